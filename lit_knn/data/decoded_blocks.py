"""Decodes the images to prepare in threads, a block of them at a time."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lit_knn.common.progress import SECONDS_BETWEEN_LINES_IN_A_FILE
from lit_knn.data.bad_images import BadImageError
from lit_knn.data.image_files import check_same_size
from lit_knn.data.partial_file import PartialContent

if TYPE_CHECKING:
    from tqdm import tqdm


def decoded_blocks(
    content: PartialContent, shape: tuple[int, ...], size: int, workers: int
) -> Iterator[bytes]:
    """Decode the missing images, and yield the pixels of each block.

    Args:
        content: says which images are done, and gets the new ones and the bad ones.
        shape: (C, H, W), which all images must have.
        size: number of files in a block.
        workers: threads that decode.
    """
    images, candidates = content.images, content.candidates()
    first, missing = images.names[candidates[0]], candidates[content.done :]

    def read(i: int) -> np.ndarray | BadImageError:
        try:
            image = images.read(i)
        except BadImageError as error:
            # It is returned, because a raised one would end the whole block.
            return error
        check_same_size(first, shape, images.names[i], image.shape)
        return image

    with ThreadPoolExecutor(workers) as pool, preparing_bar(len(candidates), content.done) as bar:
        for start in range(0, len(missing), size):
            block = missing[start : start + size]
            pixels = bytearray()

            for i, image in zip(block, pool.map(read, block), strict=True):
                bar.update()
                if isinstance(image, BadImageError):
                    content.add_bad(i, image)
                    continue
                pixels += image.tobytes()
                content.add(i)

            content.end_block()
            yield bytes(pixels)


def preparing_bar(total: int, done: int, text: str = "Preparing") -> "tqdm":
    """Return the progress bar of a preparation, of whose `total` images some are `done`."""
    from tqdm import tqdm

    # In a log file each refresh adds a line, so they are rare there. On a terminal, 0.1 s is tqdm's default.
    between = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES_IN_A_FILE
    return tqdm(total=total, initial=done, desc=text, unit=" images", mininterval=between)
