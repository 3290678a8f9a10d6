"""Decodes image files: one way from the bytes of a file to its pixels, for every kind of source."""

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np

from lit_knn.common.errors import InputError, first_line, printable

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow reads these formats without loss of meaning. The content decides, not the suffix.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Images in these modes become RGB without loss. Other modes lose more: floats would be cut off.
TO_RGB = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
RULE = "only opaque RGB, palette and 8-bit grayscale (L) images are read"
# Exif's number of the tag that says how to turn a photo, and its value for a photo that is upright.
ORIENTATION, UPRIGHT = 0x0112, 1
NAMED = 10


class BadImageError(InputError):
    """A file that no option can make an image of this set, such as a damaged one."""


class UnreadFileError(BadImageError):
    """A file that the system could not read this time, such as one without permission."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """The changes made to each image, and the source of its label."""

    size: int | None = None  # width and height after resizing, with antialiasing (Lanczos)
    center_crop: bool = False  # first cut the largest square out of the middle
    rgb: bool = False  # make grayscale, CMYK and transparent images RGB
    labels_from_folders: bool = False  # label each image by its folder, see `image_labels`
    background: str = "white"  # the colour behind transparent parts, with `rgb`

    def __post_init__(self) -> None:
        from PIL import ImageColor

        if self.background != "white" and not self.rgb:
            raise InputError(f"--background {self.background} goes with --rgb")
        if len(ImageColor.getrgb(self.background)) != 3:
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


def decode(
    read: Callable[[str], bytes], name: str, options: PrepareOptions | None = None
) -> np.ndarray:
    """Decode one image as viewers show it: a photo is turned as its Exif tag says.

    Args:
        read: returns the content of a file.
        name: the name of the file.
        options: the changes made to the image; None for none.

    Returns:
        Pixels (C, H, W), uint8; C is 1 for grayscale and 3 for colour. A palette is its colours.

    Raises:
        BadImageError: the file is damaged, has several frames or more than 8 bits a channel.
        UnreadFileError: the system cannot read the file.
        InputError: the image needs other options, such as `rgb` for transparent parts.
    """
    options, shown = options or PrepareOptions(), printable(name)
    try:
        content = read(name)
    except OSError as error:
        raise UnreadFileError(f"{shown} cannot be read: {first_line(error):.300}") from error
    except MemoryError:
        raise
    except Exception as error:  # Zips have checksums, and may be damaged.
        raise BadImageError(f"{shown} cannot be read: {first_line(error):.300}") from error

    try:
        image = _upright(_opened(content, shown))
        image = options.sized(options.coloured(image, shown), shown)
        pixels = np.asarray(image)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Damaged files raise errors of many types.
        problem = f"{shown} cannot be read as an image: {first_line(error):.300}"
        raise BadImageError(problem) from error
    return pixels[None] if image.mode == "L" else pixels.transpose(2, 0, 1)


def has_frames(open_: Callable[[str], IO[bytes]], name: str) -> bool:
    """Return whether a file has several frames, as animations have; False if it is damaged."""
    from PIL import Image

    try:
        with open_(name) as file, Image.open(file, formats=FORMATS) as image:
            return _moves(image)
    except MemoryError:
        raise
    except Exception:  # `decode` will say what is wrong with it.
        return False


def bad_images(problems: Sequence[str], number: int, advice: str) -> InputError:
    """Return the error that names bad image files: ten, and their count.

    Args:
        problems: one line for each bad file.
        number: number of all image files.
        advice: what the user can do.
    """
    if len(problems) == 1:
        return InputError(f"{problems[0]}; {advice}")

    named = "; ".join(problems[:NAMED])
    rest = len(problems) - NAMED
    more = f"; and {rest:,} more" if rest > 0 else ""
    count = f"{len(problems):,} of {number:,} image files are bad"
    return InputError(f"{count}: {named}{more}; {advice}")


def _opened(content: bytes, name: str) -> "Image":
    """Open an image of one frame and at most 8 bits a channel, and decode it."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise BadImageError(f"{name} is empty")

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImageError(f"{name} is not an image, as {', '.join(FORMATS)}") from error

    if _moves(image):
        raise BadImageError(f"{name} has several frames")

    # Pillow would cut the low byte of colours off, and its mode would not tell.
    if ";16" in str(image.tile):
        raise BadImageError(f"{name} has 16 bits a channel (make it 8 bits first)")

    image.load()
    return image


def _moves(image: "Image") -> bool:
    # The other frames of a phone's JPEG (MPO) are previews of the first.
    return getattr(image, "is_animated", False) and image.format != "MPO"


def _upright(image: "Image") -> "Image":
    """Turn a photo as its Exif tag says."""
    from PIL import ImageOps

    try:
        orientation = image.getexif().get(ORIENTATION, UPRIGHT)
    except Exception:  # The tags are damaged. Viewers then show the photo as it is stored.
        return image
    return image if orientation == UPRIGHT else ImageOps.exif_transpose(image)


def _transparency(image: "Image") -> str:
    """Say which mode a transparent image has, and what makes it transparent."""
    if image.mode == "P":
        return "palette with transparency"
    if "transparency" in image.info:
        return f"{image.mode} with a transparent colour"
    return image.mode
