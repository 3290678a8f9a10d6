"""Finds the configs of the project by name, so that `-c demo` works without a checkout. A file on the disk wins."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.common.extras import WHOLE_PROJECT
from lit_knn.data.files import reading

CONFIG_OPTIONS = ("-c", "--config")
SUFFIX = ".yaml"
FILES = (SUFFIX, ".yml")
# These folders hold parts of runs. A run's file names them; `-c` cannot take them.
PARTS = ("data", "models", "estimators", "trainer")
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
    return sorted(
        p.relative_to(folder()).with_suffix("").as_posix() for p in folder().rglob(f"*{SUFFIX}")
    )


def with_packaged_configs(args: Sequence[str]) -> list[str]:
    """Replace names of the project's configs by their paths, and refuse missing files with the nearest names.

    After `-c`, `demo`, `demo.yaml` and `configs/demo.yaml` name the same file. Other options take names with the suffix
    alone (`--model.net models/unet.yaml`), because they also take classes.
    """
    found: list[str] = []
    for i, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        if equals and option.startswith("-"):
            found.append(f"{option}={_path(option, value)}")
        else:
            found.append(_path(args[i - 1], arg) if i > 0 and args[i - 1].startswith("-") else arg)
    return found


def with_packaged_parts(options: Any, beside: Path) -> Any:
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
    runs = [known for known in names() if known.partition("/")[0] not in PARTS]
    near = difflib.get_close_matches(asked, runs, n=3)
    return (
        f"; did you mean {' or '.join(near)}?"
        if near
        else f"; the configs of lit_knn are {', '.join(runs)}"
    )


def hint_of_part(name: str) -> str:
    """Return what to add to the message that a part of a config, such as an estimator, is missing: the nearest one."""
    parts = {Path(known).name: known for known in names() if known.partition("/")[0] in PARTS}
    near = difflib.get_close_matches(Path(name).stem, parts, n=1)
    return f"; did you mean {parts[near[0]]}{SUFFIX}?" if near else ""


def _path(option: str, value: str) -> str:
    if value.startswith(("{", "[")):
        return NAMED_FILE.sub(lambda match: _packaged(match[0]), value)
    is_config, is_text = option in CONFIG_OPTIONS, any(mark in value for mark in ("{", ": ", ":\n"))
    if is_text or not (is_config or value.endswith(FILES)):
        return value
    path = Path(_packaged(value))
    if not path.is_file():
        near = hint(value) if is_config else hint_of_part(value)
        wrong = "this is a folder" if path.is_dir() else f"no such file{near}"
        raise InputError(f"{'--config' if is_config else option} {value}: {wrong}")
    # The parser's error would not name the file.
    with reading(f"{'--config' if is_config else option} {value}"):
        path.read_text(encoding="utf-8")
    return str(path)


def _packaged(value: str) -> str:
    """Return the path of the config of this name; the value itself if there is such a file, or no such config."""
    return (
        str(folder() / f"{_name(value)}{SUFFIX}")
        if _name(value) in names() and not Path(value).is_file()
        else value
    )


def _name(value: str) -> str:
    return value.removeprefix("./").removeprefix("configs/").removesuffix(SUFFIX)
