"""Finds the configs of the project by name, so that `-c demo` works without a checkout. A file on the disk wins."""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import lit_knn
from lit_knn.common.errors import InputError, reading
from lit_knn.common.extras import WHOLE_PROJECT

CONFIG_OPTIONS = ("-c", "--config")
SUFFIX = ".yaml"
FILES = (SUFFIX, ".yml")
# These folders hold parts of runs. A run's file names them; `-c` cannot take them.
PARTS = ("data", "models", "estimators", "trainer")
# YAML in place of a file has one of these.
TEXT_MARKS = ("{", ": ", ":\n")
# A file that a value in braces names: {class_path: Network, init_args: {net: configs/models/unet.yaml}}.
NAMED_FILE = re.compile(r"[\w./-]+\.yaml")


def folder() -> Path:
    """Return the folder of the configs: in the package if it was installed from a wheel, else in the checkout.

    Raises:
        InputError: the folder is missing.
    """
    for place in lit_knn.__path__:
        configs = Path(place) / "configs"

        if configs.is_dir():
            return configs.resolve()

    raise InputError(f"the configs of lit_knn are missing; {WHOLE_PROJECT}")


def names() -> list[str]:
    """Return the names of all configs, parts included, such as `demo` and `estimators/knn`."""
    root = folder()
    paths = root.rglob(f"*{SUFFIX}")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in paths)


def _is_part(name: str) -> bool:
    """Return whether a config is a part of runs, such as an estimator."""
    return name.partition("/")[0] in PARTS


def with_packaged_configs(args: Sequence[str]) -> list[str]:
    """Replace names of the project's configs by their paths, and refuse missing files with the nearest names.

    After `-c`, `demo`, `demo.yaml` and `configs/demo.yaml` name the same file. Other options take names with the suffix
    alone (`--model.net models/unet.yaml`), because they also take classes.
    """
    replaced: list[str] = []
    for before, arg in pairwise(["", *args]):
        option, equals, value = arg.partition("=")
        if equals and option.startswith("-"):
            replaced.append(f"{option}={_path(option, value)}")
        elif before.startswith("-"):
            replaced.append(_path(before, arg))
        else:
            replaced.append(arg)
    return replaced


def with_packaged_parts(options: object, beside: Path) -> object:
    """Replace names of the project's configs in the options of a file by their paths; files in `beside` win."""
    if isinstance(options, dict):
        return {name: with_packaged_parts(value, beside) for name, value in options.items()}
    if isinstance(options, list):
        return [with_packaged_parts(value, beside) for value in options]

    if isinstance(options, str) and options.endswith(SUFFIX) and not (beside / options).is_file():
        return _packaged(options)
    return options


def hint(name: str) -> str:
    """Return what to add to the message that a config is missing: the names that there are."""
    asked = _name(name)
    if Path(name).suffix and asked == name.removesuffix(SUFFIX):
        return ""  # This is a file of the user's own.

    runs = [known for known in names() if not _is_part(known)]
    near = difflib.get_close_matches(asked, runs, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; the configs of lit_knn are {', '.join(runs)}"


def hint_of_part(name: str) -> str:
    """Return what to add to the message that a part of a config, such as an estimator, is missing: the nearest one."""
    parts = {}
    for known in names():
        if _is_part(known):
            parts[Path(known).name] = known

    near = difflib.get_close_matches(Path(name).stem, parts, n=1)
    return f"; did you mean {parts[near[0]]}{SUFFIX}?" if near else ""


def _path(option: str, value: str) -> str:
    """Return the value of an option with the path of the config that it names, which can be read."""
    if value.startswith(("{", "[")):
        return NAMED_FILE.sub(lambda match: _packaged(match[0]), value)

    is_config = option in CONFIG_OPTIONS
    is_text = any(mark in value for mark in TEXT_MARKS)
    if is_text or not (is_config or value.endswith(FILES)):
        return value

    typed = f"--config {value}" if is_config else f"{option} {value}"
    path = Path(_packaged(value))
    if path.is_dir():
        raise InputError(f"{typed}: this is a folder")
    if not path.is_file():
        near = hint(value) if is_config else hint_of_part(value)
        raise InputError(f"{typed}: no such file{near}")

    # The parser's error would not name the file.
    with reading(typed):
        path.read_text(encoding="utf-8")
    return str(path)


def _packaged(value: str) -> str:
    """Return the path of the config of this name; the value itself if there is such a file, or no such config."""
    name = _name(value)
    if name in names() and not Path(value).is_file():
        return str(folder() / f"{name}{SUFFIX}")
    return value


def _name(value: str) -> str:
    return value.removeprefix("./").removeprefix("configs/").removesuffix(SUFFIX)
