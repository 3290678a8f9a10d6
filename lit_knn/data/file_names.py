"""Names of files: which are images, which of them are read, and what to do with other files."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from lit_knn.common.errors import printable
from lit_knn.data.decoding import has_frames

# Suffixes of the formats whose files may have several frames.
MOVING = (".gif", ".tif", ".tiff", ".webp")
IMAGE_SUFFIXES = (".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", *MOVING)
# Image files that are counted and left out: Pillow does not read them, or only with a loss.
PHONES_AND_WEB = (".apng", ".avif", ".heic", ".heics", ".heif", ".hif", ".jxl", ".mpo", ".svg")
# fmt: off
PROGRAMS = (
    ".cur", ".dcm", ".dds", ".dib", ".emf", ".eps", ".exr", ".fits", ".hdr", ".icns", ".ico",
    ".j2k", ".jng", ".jp2", ".jpf", ".jpx", ".jxr", ".mng", ".pam", ".pbm", ".pcx", ".pfm", ".pgm",
    ".pnm", ".ppm", ".psb", ".psd", ".qoi", ".ras", ".sgi", ".svgz", ".tga", ".wdp", ".wmf", ".xcf",
)
CAMERAS = (
    ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mef", ".mos",
    ".mrw", ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw",
    ".x3f",
)
# fmt: on
OTHER_IMAGES = {*PHONES_AND_WEB, *PROGRAMS, *CAMERAS}
# Folders that other programs make among images: macOS, the recycle bin, thumbnails of Synology.
NO_DATA = ("__MACOSX", "$RECYCLE.BIN", "@eaDir")
ARCHIVES = (".7z", ".bz2", ".gz", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".xz", ".zst")
CIFAR10_FOLDER = "cifar-10-batches-py"


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is not part of the data, such as `.thumbnails/0.png`."""
    parts = name.rstrip("/").split("/")
    # The parts "." and ".." hide nothing.
    dotted = any(part.startswith(".") and part.strip(".") for part in parts)
    return dotted or not set(NO_DATA).isdisjoint(parts)


def choose_images(
    names: Iterable[str],
    open_: Callable[[str], IO[bytes]],
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the images that are read, sorted, and the kinds of the others, by name.

    Args:
        names: of files, and of folders, which end with a slash.
        open_: opens a file. It is called for formats that may have several frames.
    """
    images, left_out = [], {}
    for name in sorted(names):
        suffix = _suffix(name)
        if is_hidden(name) or name.endswith("/"):
            continue

        if suffix in OTHER_IMAGES:
            left_out[name] = suffix
        elif suffix in MOVING and has_frames(open_, name):
            left_out[name] = f"{suffix} of several frames"
        elif name.lower().endswith(IMAGE_SUFFIXES):
            images.append(name)
    return images, left_out


def left_out_line(images: Sequence[str], left_out: Mapping[str, str]) -> str:
    """Count what is left out: "14 of 20 image files are left out: 12 .heic, 2 .svg"."""
    # Sorted first, because `most_common` leaves kinds with equal counts in their order.
    kinds = Counter(sorted(left_out.values())).most_common()
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
    total = len(images) + len(left_out)
    return f"{len(left_out):,} of {total:,} image files are left out: {counts}"


def nothing_read(path: Path, names: Sequence[str], left_out: Mapping[str, str]) -> str:
    """Return the error message for a folder or zip in which there is no image to read.

    It says what the folder or zip holds instead, and what to do.

    Args:
        path: the folder or zip.
        names: of its files and folders.
        left_out: kinds of the image files that are not read, by name.
    """
    problem = f"{path} holds no image files that are read ({', '.join(sorted(IMAGE_SUFFIXES))})"
    if left_out:
        return f"{problem}; {left_out_line([], left_out)}"

    if path.name == CIFAR10_FOLDER or f"{CIFAR10_FOLDER}/" in names:
        advice = (
            "CIFAR-10 is read by --data CIFAR10, or by lit-knn prepare, from the folder that has"
        )
        return f"{problem}; {advice} {CIFAR10_FOLDER}"

    files = [name for name in names if not name.endswith("/") and not is_hidden(name)]
    if not files:
        return f"{problem}; it is empty"

    suffix, number = Counter(map(_suffix, files)).most_common(1)[0]
    if not suffix:
        return (
            f"{problem}; {number:,} of its files have no suffix: images need that of their format"
        )

    advice = advice_for(Path(f"file{suffix}"))
    return f"{problem}; {number:,} of its files have {printable(suffix)}{advice}"


def advice_for(path: Path) -> str:
    """Return the end of an error message: how a file with the suffix of `path` can become data."""
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        prepared = "--data Prepared, if lit-knn prepare made it, and otherwise with --data Arrays"
        return f": read it with {prepared if suffix == '.npy' else '--data Arrays'}"
    if suffix == ".zip":
        return ": give the zip itself"
    if suffix in ARCHIVES:
        return ": unpack it into a folder"
    if suffix in IMAGE_SUFFIXES or suffix in OTHER_IMAGES:
        return ": give the folder of the images"
    return ": write its images into a folder, or write a data module (docs/extending.md)"


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
