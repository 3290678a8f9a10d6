"""Decodes the images to prepare in threads, a block of them at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lit_knn.common.progress import progress_bar
from lit_knn.data.bad_images import BadImageError
from lit_knn.data.image_files import check_same_size
from lit_knn.data.partial_file import PartialContent


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

    bar = progress_bar(
        len(candidates), "Preparing", " images", leave=True, shown=True, initial=content.done
    )
    with ThreadPoolExecutor(workers) as pool, bar:
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
