"""Decodes image files: turns the bytes of a file into pixels, in the same way for every source."""

import io
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

import numpy as np

from lit_knn.common.errors import InputError, first_line, printable
from lit_knn.data.bad_images import BadImageError, UnreadFileError
from lit_knn.data.prepare_options import PrepareOptions

if TYPE_CHECKING:
    from PIL.Image import Image

# The formats that are read, by Pillow's names. The content of a file tells its format, and not its suffix.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Exif's number of the tag that says how to turn a photo, and its value for a photo that is upright.
ORIENTATION, UPRIGHT = 0x0112, 1


def decode(
    read: Callable[[str], bytes], name: str, options: PrepareOptions | None = None
) -> np.ndarray:
    """Decode one image as viewers show it: a photo is turned as its Exif tag says.

    Args:
        read: returns the content of a file.
        name: the name of the file.
        options: the changes made to the image; None for none.

    Returns:
        Pixels (C, H, W), uint8; C is 1 for grayscale and 3 for colour, also for the colours of a palette.

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


def header(read: Callable[[str], bytes], name: str) -> tuple[object, ...] | None:
    """Return what an image file says of its shape, without decoding it; None if only `decode` can tell.

    Files of equal headers have images of equal shape. A damaged file and one with Exif tags, which may turn it, have
    none.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read(name)), formats=FORMATS) as image:
            if "exif" in image.info:
                return None
            return image.format, image.mode, image.size
    except MemoryError:
        raise
    except Exception:  # `decode` will say what is wrong with it.
        return None


def has_frames(open_: Callable[[str], IO[bytes]], name: str) -> bool:
    """Return whether an image file has several frames, as animations have; False for a damaged file."""
    from PIL import Image

    try:
        with open_(name) as file, Image.open(file, formats=FORMATS) as image:
            return _has_several_frames(image)
    except MemoryError:
        raise
    except Exception:  # `decode` will say what is wrong with it.
        return False


def _opened(content: bytes, name: str) -> "Image":
    """Decode an image; raise BadImageError for several frames or more than 8 bits a channel."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise BadImageError(f"{name} is empty")

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImageError(f"{name} is not an image, as {', '.join(FORMATS)}") from error

    if _has_several_frames(image):
        raise BadImageError(f"{name} has several frames")

    # Pillow would drop the low byte of 16-bit colours, and the mode of its image would not show it.
    if ";16" in str(image.tile):
        raise BadImageError(f"{name} has 16 bits a channel (make it 8 bits first)")

    image.load()
    return image


def _has_several_frames(image: "Image") -> bool:
    # In a phone's JPEG (MPO) the other frames are previews of the first, so they do not count.
    return getattr(image, "is_animated", False) and image.format != "MPO"


def _upright(image: "Image") -> "Image":
    """Turn a photo as its Exif tag says."""
    from PIL import ImageOps

    try:
        orientation = image.getexif().get(ORIENTATION, UPRIGHT)
    except Exception:  # The tags are damaged. Viewers then show the photo as it is stored.
        return image
    return image if orientation == UPRIGHT else ImageOps.exif_transpose(image)
