"""Images in tars, plain ones and those of WebDataset, whose labels are `.cls` or `.json` files of the same key."""

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from lit_knn.common.errors import InputError, printable, reading
from lit_knn.data.files import Files, ImageLabels, by_name, image_files, say, with_slashes

TAR = ".tar"
LABEL_ADVICE = "give its .json files' key as label_key, add .cls files, or set labels_from_folders"


class TarEntry(NamedTuple):
    """Where the content of a file lies in a tar."""

    tar: Path
    start: int
    size: int
    changed: int  # seconds


def tar_paths(text: str) -> list[Path]:
    """Return the tars of a path, a path with braces such as `a-{00..12}.tar`, or a folder of tars; [] if none."""
    if not text.lower().endswith(TAR):
        folder = Path(text).expanduser()
        files = folder.iterdir() if folder.is_dir() else []
        return sorted(file for file in files if file.suffix.lower() == TAR)
    if "{" not in text:
        return [Path(text).expanduser()]

    from braceexpand import braceexpand

    with reading(text, " as paths with braces"):
        return [Path(name).expanduser() for name in braceexpand(text)]


def tar_files(text: str, tars: Sequence[Path], label_key: str | None = None) -> Files:
    """List the images of tars. They are read where they lie, from several threads if need be.

    Args:
        text: the path as it was given.
        tars: paths of uncompressed tars.
        label_key: the key in the `.json` files that has the labels; None for `.cls` files.
    """
    entries = _entries(text, tars)

    def open_(name: str) -> IO[bytes]:
        entry = entries[name]
        with entry.tar.open("rb") as file:
            file.seek(entry.start)
            return io.BytesIO(file.read(entry.size))

    def stamp(name: str) -> tuple[int, int]:
        return entries[name].size, entries[name].changed

    files = image_files(Path(text), list(entries), open_, stamp)
    _say_of_several(files)
    files = files._replace(label_advice=LABEL_ADVICE)
    try:
        labels = _labels(files, ".json" if label_key else ".cls", label_key)
    except InputError as error:
        # A key is a wish for labels. Without it, a training without classes needs none.
        if label_key is not None:
            raise InputError(f"{files.path}: {error}") from error
        labels = ImageLabels(problem=str(error))
    return files._replace(labels=labels)


def _entries(text: str, tars: Sequence[Path]) -> dict[str, TarEntry]:
    """Return where each file lies. If names repeat among several tars, those of all files begin with their tar."""
    names, entries, without_end = [], [], []
    for path in tars:
        with reading(path, " as an uncompressed tar"), tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isfile():
                    entry = TarEntry(path, member.offset_data, member.size, int(member.mtime))
                    names.append(with_slashes(member.name))
                    entries.append(entry)
            if not _has_end(path, archive.offset):
                without_end.append(path)

    if without_end:
        count = f"{len(without_end):,} of {len(tars):,} tars" if len(tars) > 1 else "it"
        advice = "may have been cut, because no mark shows the end; all files there are read"
        say(f"{without_end[0]}: {count} {advice}")
    if len(tars) > 1 and len(set(names)) < len(names):
        for i, entry in enumerate(entries):
            names[i] = f"{entry.tar.stem}/{names[i]}"
    return by_name(Path(text), names, entries)


def _has_end(path: Path, end: int) -> bool:
    """Return whether a tar has the mark of its end, a block of zeros.

    Args:
        path: the tar.
        end: where its last file ends.

    Raises:
        InputError: another block is there, which is a damaged file; or a second tar follows.
    """
    with path.open("rb") as file:
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
        if not block:
            return False
        if block.strip(b"\0"):
            raise InputError(f"{path} is damaged at byte {end:,}: no file behind it can be read")

        # Programs fill the last blocks of a tar with zeros, and some write more behind them.
        while block and not block.strip(b"\0"):
            block = file.read(tarfile.BLOCKSIZE)
    if block:
        _refuse_header(path, block)
    return True


def _refuse_header(path: Path, block: bytes) -> None:
    """Raise InputError if a block behind the end of a tar is the first one of another tar."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    problem = "has a second tar behind its end, which no program reads with the first"
    raise InputError(f"{path} {problem}; give the tars apart, as a-{{00..12}}.tar")


def _say_of_several(files: Files) -> None:
    """Print a line if samples of WebDataset have several images, such as `a.jpg` and `a.mask.png`: all are read."""
    images_of: dict[str, list[str]] = {}
    kinds = set()
    for image in files.images:
        key = _sample_key(image)
        images_of.setdefault(key, []).append(image)
        kinds.add(image.removeprefix(key))

    several = [images for images in images_of.values() if len(images) > 1]
    # The frames `a.1.png`, `a.2.png` have numbers; parts of samples have names that repeat from sample to sample.
    are_numbers = all(kind.split(".")[1].isdigit() for kind in kinds)
    if several and len(kinds) < len(files.images) and not are_numbers:
        named = ", ".join(printable(image) for image in several[0][:3])
        count = (
            f"{len(several):,} of {len(images_of):,} samples have several images, such as {named}"
        )
        say(f"{files.path}: {count}; all are read")


def _sample_key(name: str) -> str:
    """Return WebDataset's key of a file: `a/b` of `a/b.left.jpg`, its name up to the first dot after the last slash."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _labels(files: Files, suffix: str, label_key: str | None) -> ImageLabels | None:
    """Return the labels of the files with the images' keys; None if there is no such file.

    In WebDataset, as here, `.CLS` is the same as `.cls`. Raises InputError for labels that are missing or no numbers.
    """
    stored_names = {}
    for name in files.names:
        stem, extension = os.path.splitext(name)
        stored_names[stem + extension.lower()] = name

    labels = np.empty(len(files.images), np.int64)
    missing = []
    for i, image in enumerate(files.images):
        label_file = _sample_key(image) + suffix
        if label_file not in stored_names:
            missing.append(image)
            continue

        with reading(printable(label_file), " as a label"):
            labels[i] = _label(files.read(stored_names[label_file]), label_key)

    if len(missing) == len(files.images) and label_key is None:
        unused = [name for key, name in stored_names.items() if key.endswith(suffix)]
        if not unused:
            return None
        count = f"none of its {len(unused):,} {suffix} files, such as {printable(unused[0])}"
        return ImageLabels(problem=f"{count}, has an image's name up to its first dot")
    if missing:
        count = f"{len(missing)} of {len(files.images)} images have no {suffix} file"
        raise InputError(f"{count}, {printable(missing[0])} for one")
    return ImageLabels(labels)


def _label(content: bytes, label_key: str | None) -> int:
    """Return the label in a `.cls` file, or under a key of a `.json` file."""
    if label_key is None:
        return int(content)

    fields = json.loads(content)
    if not isinstance(fields, dict) or label_key not in fields:
        raise ValueError(f"it has no key {label_key}")

    label = fields[label_key]
    # In Python, True is an integer, too.
    if not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(f"{label_key} is {label!r:.80}, and labels are integers")
    return label
