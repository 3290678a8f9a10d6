"""The share of samples that are copies, by the pixels; and the likest pairs of samples and images."""

from torch import Tensor

from lit_knn.common.progress import progress_bar
from lit_knn.common.tables import Row
from lit_knn.data.image_stream import ImageStream
from lit_knn.metrics.memorisation import LikestPairs, MemorisationMetric, nearest_images
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

    make = RowMaker(samples, data, "Pixels", as_bytes=False)
    rows = []
    for name, result in metric.with_errors().items():
        rows.append(make(name, data.name, result.mean, result.standard_error))

    pairs, ids = likest.compute()
    return rows, (pairs, reference.gather(ids))
