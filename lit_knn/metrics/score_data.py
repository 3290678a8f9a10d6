"""What `score` compares samples with: images, images held out of a training, and published statistics."""

from dataclasses import dataclass, field

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures
from lit_knn.data.image_stream import ImageStream
from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.reference import ReferenceSet


@dataclass
class ScoreData:
    """What samples are compared with.

    Args:
        name: name of the images.
        images: the images, if they are at hand; mirror images count for copies alone.
        held_out: images that no training saw, for C_T.
        statistics: published statistics, by the name of their file.
    """

    name: str = ""
    images: ReferenceSet | None = None
    held_out: ReferenceSet | None = None
    statistics: dict[str, FeatureStatistics] = field(default_factory=dict)

    def check_shapes(self, samples: ImageStream) -> None:
        """Raise InputError if samples or held-out images have another shape than the images."""
        if self.images is None:
            return
        shape = self.images.shape
        if self.held_out is not None and self.held_out.shape != shape:
            sizes = f"held_out has {size_of(self.held_out.shape)}, but {self.name} {size_of(shape)}"
            raise InputError(f"{sizes}: give images of the same kind")
        if samples.shape == shape:
            return

        sizes = f"{samples.name} has {size_of(samples.shape)}, but {self.name} {size_of(shape)}"
        if not (are_pictures(samples.shape) and are_pictures(shape)):
            raise InputError(f"{sizes}: give samples of the same kind")

        channels, height, width = shape
        if channels == 1 != samples.shape[0]:
            advice = "another program must make the samples grey, or the data needs colours"
            raise InputError(f"{sizes}: {advice}")

        make = "make them alike first, with the filter that the samples are to be judged by"
        colour = " --rgb" if channels == 3 != samples.shape[0] else ""
        command = f"lit-knn prepare {samples.name} alike.npy --size {width}{colour}"
        if width != height:
            command = "images that are not square are resized by another program"
        raise InputError(f"{sizes}: {make}: {command}")


def size_of(shape: tuple[int, ...]) -> str:
    """Describe the shape of an image in a message."""
    if len(shape) != 3:
        return f"items of shape {shape}"
    channels, height, width = shape
    return f"images of {width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
