"""The options of `prepare`: the changes made to each image."""

import dataclasses
from typing import TYPE_CHECKING

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.data.bad_images import BadImageError

if TYPE_CHECKING:
    from PIL.Image import Image

# Images in these modes can become RGB. In other modes too much would be lost: floats would be cut off.
TO_RGB = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
RULE = "only opaque RGB, palette and 8-bit grayscale (L) images are read"


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """The changes made to each image, and the source of its label."""

    size: int | None = None  # width and height after resizing, with antialiasing (Lanczos)
    center_crop: bool = False  # first cut the largest square out of the middle
    rgb: bool = False  # make grayscale, CMYK and transparent images RGB
    labels_from_folders: bool = False  # label each image by its folder, see `image_labels`
    label_key: str | None = None  # column of a table, or key of a tar's .json, with the labels
    background: str = "white"  # the colour behind transparent parts, with `rgb`

    def __post_init__(self) -> None:
        from PIL import ImageColor

        if self.size is not None:
            check_at_least(1, **{"--size": self.size})
        if self.background != "white" and not self.rgb:
            raise InputError(f"--background {self.background} goes with --rgb")
        try:
            channels = len(ImageColor.getrgb(self.background))
        except ValueError as error:
            raise InputError(f"--background: there is no colour {self.background!r}") from error
        if channels != 3:
            raise InputError(f"--background must be an opaque colour, got {self.background}")

    def coloured(self, image: "Image", name: str) -> "Image":
        """Return an image of mode RGB or L. Transparent parts show the background."""
        from PIL import Image

        if image.has_transparency_data:
            if not self.rgb:
                advice = "lit-knn prepare puts it on white with --rgb"
                raise InputError(f"{name} has mode {_transparency(image)}; {RULE}: {advice}")
            ground = Image.new("RGBA", image.size, self.background)
            return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")

        if image.mode == "P" or (self.rgb and image.mode in TO_RGB):
            return image.convert("RGB")

        if image.mode in ("RGB", "L"):
            return image

        if image.mode in TO_RGB:
            advice = "lit-knn prepare makes it RGB with --rgb"
            raise InputError(f"{name} has mode {image.mode}; {RULE}: {advice}")

        raise BadImageError(f"{name} has mode {image.mode}; {RULE}")

    def sized(self, image: "Image", name: str) -> "Image":
        """Crop and resize an image of mode RGB or L."""
        from PIL import Image

        width, height = image.size
        if self.center_crop:
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        elif self.size is not None and width != height:
            squeezed = f"{name} is {width}x{height}, which --size {self.size} would squeeze"
            raise InputError(f"{squeezed}: add --center-crop")

        if self.size is None or image.size == (self.size, self.size):
            return image
        return image.resize((self.size, self.size), Image.Resampling.LANCZOS)


def _transparency(image: "Image") -> str:
    """Describe the mode of a transparent image, and what makes it transparent."""
    if image.mode == "P":
        return "palette with transparency"
    if "transparency" in image.info:
        return f"{image.mode} with a transparent colour"
    return image.mode
