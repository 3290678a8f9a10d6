"""Images tiled into one picture."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lit_knn.common.pixels import to_uint8

# Small images are enlarged to about this many pixels a side, so that people can see them.
MIN_SIDE = 32
PAIRS_PER_ROW = 8
# Size of a caption's letters and the white around it, in pixels.
LETTERS, MARGIN = 12, 4


def image_grid(images: Tensor, columns: int | None = None) -> Tensor:
    """Tile images into one picture.

    Args:
        images: (B, C, H, W), in model space.
        columns: images in a row; None for a picture that is nearly square.

    Returns:
        (3, H', W'), in [0, 1].
    """
    # Imported here, because it takes seconds, which figures without a grid need not wait for.
    from torchvision.utils import make_grid

    # The quotient is rounded up.
    enlarge = max(-(-MIN_SIDE // images.shape[-1]), 1)
    pixels = to_uint8(images).cpu().float() / 255
    pixels = pixels.repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)

    columns = columns or max(round(len(images) ** 0.5), 1)
    return make_grid(pixels, nrow=columns, padding=2, pad_value=1.0)


def captioned(picture: Tensor, caption: str) -> Tensor:
    """Write one line of text below a picture (3, H, W) in [0, 1]; a narrow one becomes wider."""
    font = ImageFont.load_default(LETTERS)
    left, _, right, bottom = map(round, font.getbbox(caption))
    _, H, W = picture.shape
    size = max(W, right - left + 2 * MARGIN), H + bottom + 2 * MARGIN

    canvas = Image.new("RGB", size, "white")
    ImageDraw.Draw(canvas).text((MARGIN - left, H + MARGIN), caption, fill="black", font=font)
    written = torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255
    written[:, :H, :W] = picture
    return written


def pair_grid(upper: Tensor, lower: Tensor) -> Tensor:
    """Tile pairs of images, so that each row of upper images is above its lower images.

    Args:
        upper: (n, C, H, W), n >= 1, in model space.
        lower: of the same shape.
    """
    columns = min(len(upper), PAIRS_PER_ROW)
    parts = []
    for above, below in zip(upper.split(columns), lower.split(columns), strict=True):
        pair = torch.cat([_filled(above, columns), _filled(below, columns)])
        parts.append(image_grid(pair, columns))
    return torch.cat(parts, 1)


def _filled(images: Tensor, columns: int) -> Tensor:
    """Fill up a row with white images to `columns` images."""
    white = images.new_ones(columns - len(images), *images.shape[1:])
    return torch.cat([images, white])
