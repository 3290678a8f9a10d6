"""The rows of `score`: one for each set of samples, metric and reference."""

import math

import torch

from lit_knn.common.tables import Row
from lit_knn.data.image_stream import ImageStream
from lit_knn.metrics.data_statistics import num_compared
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.score_options import ScoreOptions

# How values became the bytes that networks see. EDM's code computes int(127.5 x + 128), which is the same but for
# ties; guided-diffusion's int(127.5 x + 127.5) is up to one level darker.
AS_STORED = "bytes as stored"
ROUNDED = "floats, rounded to bytes"
NOT_ROUNDED = "floats, not rounded"
NOT_KNOWN = "not known"


class RowMaker:
    """Makes the rows of one set of samples and one kind of features.

    Args:
        samples: the samples.
        data: what they are compared with.
        features: name of the features.
        as_bytes: whether the features are those of bytes, as a network's, and not of floats.
        options: options of `score`.
    """

    def __init__(
        self,
        samples: ImageStream,
        data: ScoreData,
        features: str,
        as_bytes: bool,
        options: ScoreOptions,
    ) -> None:
        self.samples = samples
        self.data = data
        self.features = features
        self.as_bytes = as_bytes
        self.options = options

    def __call__(
        self, metric: str, reference: str, value: float, error: float | None = None
    ) -> Row:
        """Return a row of the table.

        Args:
            metric: name of the value.
            reference: name of what the samples are compared with, "" for nothing.
            value: the value.
            error: its standard error, None or not finite if it is not known.
        """
        row: Row = {"samples": self.samples.name, "metric": metric, "value": value}
        row["standard_error"] = error if error is not None and math.isfinite(error) else ""
        row |= {"features": self.features, "images": self.samples.count, "reference": reference}
        row |= {"reference_images": "", "pixels": self._pixels(self.samples.is_bytes)}
        row["reference_pixels"] = NOT_KNOWN if reference else ""
        row["options"] = self.options.set_for(metric)

        images = self.data.images
        if images is not None and reference == self.data.name:
            row["reference_images"] = num_compared(images)
            row["reference_pixels"] = self._pixels(images.images.dtype == torch.uint8)
        return row

    def _pixels(self, is_bytes: bool) -> str:
        """Say how the pixels of stored bytes or floats became what is compared."""
        if is_bytes:
            return AS_STORED
        return ROUNDED if self.as_bytes else NOT_ROUNDED
