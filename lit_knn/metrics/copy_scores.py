"""Tests for copies: by pixels, with the likest pairs of samples and images; and by features."""

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.progress import progress_bar
from lit_knn.common.tables import Row
from lit_knn.data.image_stream import ImageStream
from lit_knn.metrics.comparison import Comparison
from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.metrics.memorisation import LikestPairs, MemorisationMetric, nearest_images
from lit_knn.metrics.sample_quality import FEWEST_IN_TEST, copying_score, is_authentic
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.score_options import ScoreOptions
from lit_knn.metrics.score_table import RowMaker
from lit_knn.reference import ReferenceSet


def copy_rows(
    samples: ImageStream, data: ScoreData, reference: ReferenceSet, options: ScoreOptions
) -> tuple[list[Row], tuple[Tensor, Tensor]]:
    """Compare each sample with its nearest images, mirror images of `hflip` included.

    Args:
        samples: the samples.
        data: what they are compared with.
        reference: its images.
        options: options of `score`.

    Returns:
        The rows `copied_fraction` and `mean_nearest_distance`; and the samples and nearest images of
        the pairs with the smallest ratios, (n, *shape) each, in model space.
    """
    metric = MemorisationMetric(options.copy_threshold).to(reference.device)
    likest = LikestPairs(options.pairs, reference)

    with progress_bar(samples.count, "Nearest images", " samples") as bar:
        for _, batch in samples.numbered_batches(options.batch_size):
            batch = batch.to(reference.device)
            nearest = nearest_images(batch, reference)
            metric.update(nearest)
            likest.update(batch, nearest)
            bar.update(len(batch))

    make = RowMaker(samples, data, "Pixels", as_bytes=False, options=options)
    rows = []
    for name, result in metric.with_errors().items():
        rows.append(make(name, data.name, result.mean, result.standard_error))

    pairs, ids = likest.compute()
    return rows, (pairs, reference.gather(ids))


def refuse_few_held_out(samples: int, held_out: int) -> None:
    """Raise InputError if there are fewer samples or held-out images than C_T needs."""
    if min(samples, held_out) < FEWEST_IN_TEST:
        needs = f"at least {FEWEST_IN_TEST} samples and held-out images are needed"
        raise InputError(f"c_t: {needs}, there are {samples} and {held_out}")


def copy_tests(
    generated: FeatureStatistics,
    comparison: Comparison,
    held_out: FeatureStatistics | None,
) -> dict[str, tuple[float, float | None]]:
    """Return AuthPct and, with held-out images, C_T, with standard errors. C_T is a standard score.

    Args:
        generated: statistics of the samples, with the features of each, as all others.
        comparison: has the statistics of the images of the reference, and their distances to each other.
        held_out: statistics of images that no training saw, if there are any.
    """
    training = comparison.real.features
    assert generated.features is not None
    assert training is not None
    spacing = comparison.real_radii(1)
    authentic = is_authentic(generated.features, training, spacing).double()
    error = float(authentic.std()) / len(authentic) ** 0.5

    results: dict[str, tuple[float, float | None]] = {}
    results["auth_pct"] = 100 * float(authentic.mean()), 100 * error
    if held_out is not None:
        assert held_out.features is not None
        score = copying_score(generated.features, training, held_out.features)
        results["c_t"] = score, None
    return results
