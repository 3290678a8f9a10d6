"""Chooses the features that `score` compares; where weights cannot be loaded, offline ones answer, with a warning."""

import warnings
from collections.abc import Callable
from math import prod

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures
from lit_knn.metrics.dinov2 import DINOv2
from lit_knn.metrics.feature_networks import EfficientNetLite0, InceptionV3
from lit_knn.metrics.features import FeatureExtractor, Pixels
from lit_knn.metrics.score_options import DISTANCES, FEATURES, OF_FEATURES, ScoreOptions

# The Fréchet distance, among the names of values.
DISTANCE = "distance"
# Images of more values need the features of a network, because of the memory of the pixels' covariance.
MOST_PIXELS_BY_DEFAULT = 3 * 64 * 64


class ChosenFeatures:
    """The extractors of some metrics, loaded, and the values that each measures.

    Args:
        metrics: names of metrics, from `METRICS`.
        options: options of `score`.
        shape: shape of one image.
    """

    def __init__(self, metrics: list[str], options: ScoreOptions, shape: tuple[int, ...]) -> None:
        self.options = options
        self.shape = shape
        self._loaded: dict[type, FeatureExtractor] = {}
        self.values: dict[FeatureExtractor, list[str]] = {}
        self._problem: InputError | None = None

        if isinstance(options.features, FeatureExtractor):
            options.features.load(shape, options.device)
            self._loaded[type(options.features)] = options.features

        for metric in metrics:
            if metric in DISTANCES:
                self._add(self._of_kind(DISTANCES[metric]), [DISTANCE])
        if "fd" in metrics:
            self._add(self._of_single_images(), [DISTANCE])
        if "is" in metrics:
            self._add_inception_score()

        of_features = [metric for metric in metrics if metric in OF_FEATURES]
        if of_features:
            is_alone = metrics == ["memorisation"]
            extractor = self._of_single_images(
                pixels=is_alone and prod(shape) <= MOST_PIXELS_BY_DEFAULT
            )
            for metric in of_features:
                self._add(extractor, OF_FEATURES[metric])

        if not self.values and self._problem is not None:
            raise self._problem

    def _add(self, extractor: FeatureExtractor, names: list[str]) -> None:
        """Add values that an extractor measures, each once."""
        known = self.values.setdefault(extractor, [])
        known += [name for name in names if name not in known]

    def _add_inception_score(self) -> None:
        """Add the Inception Score. Without features that have logits it is left out, with a warning."""
        features = self.options.features
        if isinstance(features, FeatureExtractor) and features.num_logits:
            extractor = features
        else:
            extractor = self._of_kind(InceptionV3)

        if extractor.num_logits:
            self._add(extractor, ["inception_score"])
        else:
            warnings.warn("is: left out, because only Inception V3 gives it", stacklevel=2)

    def _of_single_images(self, pixels: bool = False) -> FeatureExtractor:
        """Return the features that kid, pr, dc and memorisation compare, loaded.

        With `pixels` they are those of the pixels, as for the copied fraction, if the options name none.
        """
        features = self.options.features
        if isinstance(features, FeatureExtractor):
            return features
        if features is not None:
            return self._of_kind(FEATURES[features])
        if self.values:
            return next(iter(self.values))
        if pixels or not are_pictures(self.shape):
            return self._of_kind(Pixels)
        return self._of_kind(InceptionV3)

    def _of_kind(self, kind: type[FeatureExtractor]) -> FeatureExtractor:
        """Return an extractor of a class, loaded; or the offline one if its weights cannot be downloaded."""
        if kind in self._loaded:
            return self._loaded[kind]

        weights = None
        if kind is InceptionV3:
            weights = self.options.inception_weights
        elif kind is DINOv2:
            weights = self.options.dinov2_weights
        make: Callable[..., FeatureExtractor] = kind
        extractor = make() if weights is None else make(weights)
        try:
            extractor.load(self.shape, self.options.device)
        except InputError as error:
            downloads = kind in (InceptionV3, DINOv2) and weights is None
            if not downloads or not are_pictures(self.shape):
                raise
            self._problem = error
            extractor = self._of_kind(EfficientNetLite0)
            answer = f"{extractor.metric}, which is comparable with no published value"
            warnings.warn(f"{error}. Instead of it: {answer}", stacklevel=2)

        self._loaded[kind] = extractor
        return extractor


def name_of(extractor: FeatureExtractor) -> str:
    """Return the name of features in the table."""
    name = type(extractor).__name__
    if isinstance(extractor, InceptionV3) and not extractor.is_published:
        return f"{name} with {extractor.weights}"
    return name
