"""Checksums of prepared pixels: a hash of all, and a checksum of each block, to check a few blocks alone."""

import hashlib
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

# Bytes of pixels under one checksum.
BLOCK_BYTES = 2**20
# Number of blocks that are checked when a run starts; reading them takes about a hundredth of a second.
SAMPLED_BLOCKS = 16


class PixelSums:
    """Computes the checksums of pixels as they are written or read."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._blocks: list[int] = []
        self._crc32, self._filled = 0, 0

    def update(self, pixels: bytes) -> None:
        """Add the next pixels."""
        self._sha256.update(pixels)
        left = memoryview(pixels)
        while left:
            part = left[: BLOCK_BYTES - self._filled]
            self._crc32, self._filled = zlib.crc32(part, self._crc32), self._filled + len(part)
            if self._filled == BLOCK_BYTES:
                self._blocks.append(self._crc32)
                self._crc32, self._filled = 0, 0
            left = left[len(part) :]

    @property
    def sha256(self) -> str:
        """Hash of all pixels, 64 hexadecimal digits."""
        return self._sha256.hexdigest()

    @property
    def crc32(self) -> list[int]:
        """CRC-32 of each block; the last block may be shorter."""
        return [*self._blocks, self._crc32] if self._filled else list(self._blocks)


def wrong_block(path: Path, offset: int, crc32: Sequence[int]) -> int | None:
    """Find a block with another checksum among a few random blocks. Returns its number, or None.

    Each call reads other blocks, so that many starts of runs read all of them.

    Args:
        path: the file.
        offset: where the pixels begin.
        crc32: checksum of each block.
    """
    with path.open("rb") as file:
        for number in random.SystemRandom().sample(range(len(crc32)), min(SAMPLED_BLOCKS, len(crc32))):
            file.seek(offset + number * BLOCK_BYTES)
            if zlib.crc32(file.read(BLOCK_BYTES)) != crc32[number]:
                return number
    return None
