"""What `score` measures: the names of its metrics, and its options."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.metrics.comparison import ComparisonOptions
from lit_knn.metrics.dinov2 import DINOv2
from lit_knn.metrics.feature_networks import EfficientNetLite0, InceptionV3
from lit_knn.metrics.features import FeatureExtractor, Pixels
from lit_knn.metrics.memorisation import check_threshold

# Fréchet distances, with the features of each; "fd" is that of the option `features`.
DISTANCES: dict[str, type[FeatureExtractor]] = {
    kind.metric: kind for kind in (InceptionV3, DINOv2, EfficientNetLite0, Pixels)
}
# Metrics that compare single images by features, and the values of each.
OF_FEATURES = {
    "kid": ["kid"],
    "pr": ["precision", "recall"],
    "dc": ["density", "coverage"],
    "memorisation": ["auth_pct", "c_t"],
}
# The values of memorisation that compare features; its others compare pixels.
COPY_TESTS = OF_FEATURES["memorisation"]
METRICS = (*DISTANCES, "fd", "is", *OF_FEATURES)
FEATURES: dict[str, type[FeatureExtractor]] = {
    "inception": InceptionV3,
    "dinov2": DINOv2,
    "efficientnet": EfficientNetLite0,
    "pixels": Pixels,
}


# The options that values depend on, by the names of the values.
OPTIONS_OF_VALUES = {
    "kid": "kid_subset_size",
    "precision": "pr_k",
    "recall": "pr_k",
    "density": "dc_k",
    "coverage": "dc_k",
    "copied_fraction": "copy_threshold",
}


@dataclass(frozen=True)
class ScoreOptions:
    """Options of `score`.

    Args:
        features: what kid, pr, dc and memorisation compare: a name from `FEATURES` or an extractor,
            which then also gives the Fréchet distance of its kind; None for the features of the
            first Fréchet distance that is measured, and otherwise Inception's, or, for memorisation
            alone on images of up to 64x64, those of the pixels.
        inception_weights: a local file of Inception's weights; by default they are downloaded once.
        dinov2_weights: likewise for DINOv2.
        kid_subset_size: images of each set in one of KID's 100 subsets.
        pr_k: neighbours of precision and recall.
        dc_k: neighbours of density and coverage.
        copy_threshold: largest ratio at which a sample is a copy: its distance to the nearest image over that to
            the second nearest one, see `is_copied`.
        splits: number of half-splits, which give standard errors of what is no mean; 0 for none.
        batch_size: images at a time.
        device: where features are computed.
        cache_dir: folder that keeps the statistics of the reference for other runs; null for none.
        floats_as_is: also take arrays of float images whose values leave [-1, 1] or are never negative.
        pairs: pairs of samples and nearest images that are kept for a picture.
        seed: of the half-splits.
    """

    features: str | FeatureExtractor | None = None
    inception_weights: str | None = None
    dinov2_weights: str | None = None
    kid_subset_size: int = 1000
    pr_k: int = 3
    dc_k: int = 5
    copy_threshold: float = 1 / 3
    splits: int = 4
    batch_size: int = 128
    device: torch.device | str = "cpu"
    cache_dir: str | None = None
    floats_as_is: bool = False
    pairs: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, batch_size=self.batch_size)
        check_at_least(0, splits=self.splits, pairs=self.pairs)
        check_threshold(self.copy_threshold)
        _check_device(self.device)
        _ = self.comparison  # made for the errors that its options raise
        if isinstance(self.features, str) and self.features not in FEATURES:
            known = ", ".join(FEATURES)
            raise InputError(f"features: there are no {self.features!r}; there are {known}")

    def set_for(self, metric: str) -> str:
        """Return what `metric` depends on as text, such as "pr_k=5", or "" for the default."""
        name = OPTIONS_OF_VALUES.get(metric, "")
        value = getattr(self, name, None)
        if value is None or value == getattr(ScoreOptions, name):
            return ""
        return f"{name}={value:.4g}"

    @property
    def comparison(self) -> ComparisonOptions:
        """The options of the metrics of features."""
        return ComparisonOptions(self.kid_subset_size, self.pr_k, self.dc_k)


def _check_device(device: torch.device | str) -> None:
    """Raise InputError for a name that is no device, and for a GPU that is not there."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device: {device!r} is no device, such as cpu, cuda or cuda:1") from error
    if chosen.type == "mps":
        raise InputError("device: Apple's GPU has no float64, which the metrics need: give cpu")
    number_here = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= number_here:
        here = f"PyTorch can use {number_here} GPUs of this machine"
        raise InputError(f"device: {device} is given, but {here}")


def checked_metrics(metrics: str | Sequence[str]) -> list[str]:
    """Return the names of metrics, each once, from a sequence or a text such as "fid,kid"."""
    names = metrics.split(",") if isinstance(metrics, str) else metrics
    names = [name.strip() for name in names]
    for name in names:
        if name not in METRICS:
            raise InputError(
                f"metrics: there is no metric {name!r}; there are {', '.join(METRICS)}"
            )
    return list(dict.fromkeys(names))


def default_metrics(is_picture: bool, has_images: bool) -> list[str]:
    """Return the metrics that are measured if none are named.

    Args:
        is_picture: whether the images are pictures, which networks can see.
        has_images: whether the reference has images, and not only statistics.
    """
    distance = "fid" if is_picture else "fd_pixels"
    return [distance, "kid", "pr", "memorisation"] if has_images else [distance]


def refuse_without_images(metrics: Collection[str]) -> None:
    """Raise InputError if one of the metrics compares with single images, where only statistics are known."""
    needing = [name for name in metrics if name in OF_FEATURES]
    if needing:
        rule = "compare with single images, but the reference is only statistics"
        raise InputError(f"{', '.join(needing)}: {rule}; give the images, too: --data …")
