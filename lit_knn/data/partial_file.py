"""The partial file of a preparation, and the description of what it holds."""

import errno
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from lit_knn.common.errors import InputError
from lit_knn.common.files import remove_partial, try_lock, written_whole
from lit_knn.data.bad_images import BadImageError, UnreadFileError
from lit_knn.data.growing_file import npy_header
from lit_knn.data.image_source import UnpreparedImages
from lit_knn.data.prepared import PARTIAL_SUFFIX

CONTENT_SUFFIX = f"{PARTIAL_SUFFIX}.json"
STARTS_AGAIN = "was begun with other images or in another way: starting again"


class Fields(TypedDict):
    """What `OUT.partial.json` holds."""

    options: dict[str, object]
    shape: tuple[int, ...] | None
    blocks: list[
        tuple[int, str]
    ]  # after each block: the images in the file, and a hash of their stamps
    bad: dict[str, list[str]]  # stamp and problem of each bad file, by name


class PartialContent:
    """What the partial file of `out` holds; `OUT.partial.json` keeps it.

    Args:
        images: all images of the source.
        out: the file to make.

    Attributes:
        shape: (C, H, W) of the images; None before the first.
        done: number of images in the file.
        bad: stamp and problem of the bad files, by name, in the order of the source.
    """

    def __init__(self, images: UnpreparedImages, out: Path) -> None:
        self.images = images
        self.out = out
        self.shape: tuple[int, ...] | None = None
        self.done = 0
        self.bad: dict[str, list[str]] = {}
        # After each block: the images in the file, and a hash of their stamps.
        self._blocks: list[tuple[int, str]] = []
        self._stamps = hashlib.sha256()

    def candidates(self) -> list[int]:
        """Return the numbers of the images that are not known to be bad; the first `done` of them are in the file."""
        return [i for i, name in enumerate(self.images.names) if name not in self.bad]

    def add(self, i: int) -> None:
        """Count image i, which comes next in the file."""
        self._stamps.update(self._stamp(i).encode(errors="surrogateescape"))
        self.done += 1

    def add_bad(self, i: int, error: BadImageError) -> None:
        """Note that file i is bad."""
        # No file has the stamp "", so the next preparation tries this one again.
        stamp = "" if isinstance(error, UnreadFileError) else self._stamp(i)
        self.bad[self.images.names[i]] = [stamp, str(error)]

    def end_block(self) -> None:
        """Note that the images up to here are in the file."""
        self._blocks.append((self.done, self._stamps.hexdigest()))

    def write(self) -> None:
        """Write this description to its file."""
        fields: Fields = {
            "options": self.images.origin["options"],
            "shape": self.shape,
            "blocks": self._blocks,
            "bad": self.bad,
        }
        write_json(beside(self.out, CONTENT_SUFFIX), fields)

    def read(self, file_bytes: int) -> None:
        """Take over what an interrupted preparation has done, up to the first image that changed.

        Args:
            file_bytes: size of the partial file.
        """
        path = beside(self.out, CONTENT_SUFFIX)
        if not path.exists():
            return

        fields: Fields = json.loads(path.read_text(encoding="utf-8"))
        shape = fields["shape"]
        if fields["options"] == self.images.origin["options"] and shape is not None:
            self._take_over(fields, tuple(shape), file_bytes)

        if self.done:
            print(f"{self.out}: going on after {self.done:,} images", file=sys.stderr)
        elif fields["blocks"]:
            print(f"{self.out} {STARTS_AGAIN}", file=sys.stderr)

    def _take_over(self, fields: Fields, shape: tuple[int, ...], file_bytes: int) -> None:
        """Take over the blocks of images of `shape` before the first image that changed."""
        for i, name in enumerate(self.images.names):
            known = fields["bad"].get(name)
            if known is not None and known[0] == self._stamp(i):
                self.bad[name] = known

        candidates = self.candidates()
        # The number of images by the size of the file, which may have lost the end of what was written.
        in_file = (file_bytes - len(npy_header(1, shape))) // math.prod(shape)
        stamps = self._stamps.copy()
        for done, expected in fields["blocks"]:
            if done > min(in_file, len(candidates)):
                return
            # The stamps of these images are now what they were if the hash is the same.
            for i in candidates[self.done : done]:
                stamps.update(self._stamp(i).encode(errors="surrogateescape"))
            if stamps.hexdigest() != expected:
                return
            self.shape, self.done, self._stamps = shape, done, stamps.copy()
            self.end_block()

    def _stamp(self, i: int) -> str:
        """Return a text that changes when image i does."""
        if self.images.stamp is None:
            return f"{self.images.origin['fingerprint']} {i}"
        return self.images.stamp(i)


def beside(out: Path, suffix: str) -> Path:
    """Return the path of a file that belongs to `out`."""
    return out.with_name(out.name + suffix)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that is whole or absent."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")


@contextmanager
def partial_file(out: Path) -> Iterator[io.BufferedRandom]:
    """Open the file that becomes `out`, and lock it for this process.

    An OSError in the block becomes an InputError. If the disk is full, it says what the user can do.
    """
    path, description = beside(out, PARTIAL_SUFFIX), out.with_suffix(".json")
    if description.exists() and not path.exists():
        raise InputError(f"{description} is there already: name another .npy file")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if not try_lock(file):
                raise InputError(f"{out} is being prepared by another process")
            # Another process may have finished just now. This one has then opened the finished file, or made an empty
            # partial one.
            if out.exists():
                path.unlink(missing_ok=True)
                raise InputError(f"{out} has just been prepared by another process")
            # Killed processes may have left temporary files of these two.
            for written in (beside(out, CONTENT_SUFFIX), description):
                remove_partial(written)
            yield file
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; what is done is kept: make room and give the same command again"
        problem = f"{out} cannot be written: {error.strerror}"
        raise InputError(problem + (advice if full else "")) from error
