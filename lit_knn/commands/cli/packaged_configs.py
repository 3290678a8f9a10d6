"""Finds the configs of the project by name, so that `-c demo` works without a checkout. A file on the disk wins."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import lit_knn
from lit_knn.common.errors import InputError, reading
from lit_knn.common.extras import WHOLE_PROJECT

CONFIG_OPTIONS = ("-c", "--config")
SUFFIX = ".yaml"
FILES = (SUFFIX, ".yml")
# These folders hold parts of runs. A run's file names them; `-c` cannot take them.
PARTS = ("data", "models", "estimators", "trainer")
# The options that these parts are of; other values that end with .yaml may be anything, such as a file to write.
OPTIONS_THAT_ARE_PARTS = ("data", "model", "net", "estimator", "tangent", "repulsion", "trainer")
# A value that has one of these is YAML, and not the name of a file.
TEXT_MARKS = ("{", ": ", ":\n")
# Finds the names of files in a value in braces: {class_path: Network, init_args: {net: configs/models/unet.yaml}}.
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
    """Return a command line with the paths of the project's configs in place of their names.

    After `-c`, `demo`, `demo.yaml` and `configs/demo.yaml` name the same file. Other options accept such a name only
    with its suffix (`models/unet.yaml`), because a bare name could be a class.

    Raises:
        InputError: a config is missing, is a folder or cannot be read. The message has the nearest names.
    """
    replaced: list[str] = []
    previous = ""
    for arg in args:
        option, equals, value = arg.partition("=")
        if equals and option.startswith("-"):  # --OPTION=VALUE
            replaced.append(f"{option}={_with_path(option, value)}")
        elif previous.startswith("-"):  # the value of --OPTION VALUE
            replaced.append(_with_path(previous, arg))
        else:
            replaced.append(arg)
        previous = arg
    return replaced


def with_packaged_parts(options: object, beside: Path, name: str = "") -> object:
    """Return the options of a file with the paths of the project's configs in place of their names.

    Args:
        options: the options, or one value in them.
        beside: the folder of the file. A name that is a file in this folder stays.
        name: name of the option that has this value.

    Raises:
        InputError: an option that is a part, such as `estimator`, names a file that does not exist.
    """
    if isinstance(options, dict):
        return {key: with_packaged_parts(value, beside, key) for key, value in options.items()}
    if isinstance(options, list):
        return [with_packaged_parts(value, beside, name) for value in options]
    if not isinstance(options, str) or not options.endswith(SUFFIX):
        return options

    if (beside / options).is_file():
        return options
    path = _path_of_config(options)
    if name in OPTIONS_THAT_ARE_PARTS and not Path(path).expanduser().is_file():
        raise InputError(f"{options}: no such file{hint_of_part(options)}")
    return path


def hint(name: str) -> str:
    """Return what to add to the message that a config is missing: the names that there are."""
    asked = _name_of_config(name)
    # A name with a suffix and without `configs/` is meant as the user's own file.
    if Path(name).suffix and asked == name.removesuffix(SUFFIX):
        return ""

    runs = [known for known in names() if not _is_part(known)]
    near = difflib.get_close_matches(asked, runs, n=3)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; the configs of lit_knn are {', '.join(runs)}"


def hint_of_part(name: str) -> str:
    """Return what to add to the message that a part of a config, such as an estimator, is missing: the nearest one."""
    by_last_name = {}
    for known in names():
        if _is_part(known):
            by_last_name[Path(known).name] = known

    near = difflib.get_close_matches(Path(name).stem, by_last_name, n=1)
    return f"; did you mean {by_last_name[near[0]]}{SUFFIX}?" if near else ""


def _with_path(option: str, value: str) -> str:
    """Return the value of an option with the path of the config that it names, or the value itself if it names none.

    Raises:
        InputError: the value names a file that is missing, is a folder or cannot be read.
    """
    if value.startswith(("{", "[")):  # YAML with files inside
        return NAMED_FILE.sub(lambda match: _path_of_config(match[0]), value)

    is_config = option in CONFIG_OPTIONS
    is_text = any(mark in value for mark in TEXT_MARKS)
    if is_text or not (is_config or value.endswith(FILES)):
        return value

    typed = f"--config {value}" if is_config else f"{option} {value}"
    path = Path(_path_of_config(value))
    if path.is_dir():
        raise InputError(f"{typed}: this is a folder")
    if not path.is_file():
        near = hint(value) if is_config else hint_of_part(value)
        raise InputError(f"{typed}: no such file{near}")

    # The file is read only for the error that this raises: the parser's own error would not name the file.
    with reading(typed):
        path.read_text(encoding="utf-8")
    return str(path)


def _path_of_config(value: str) -> str:
    """Return the path of the config of this name; the value itself if it is an existing file, or no such config is."""
    name = _name_of_config(value)
    if name in names() and not Path(value).is_file():
        return str(folder() / f"{name}{SUFFIX}")
    return value


def _name_of_config(value: str) -> str:
    """Return the name that `configs/demo.yaml` and `./configs/demo.yaml` share, which is `demo`."""
    return value.removeprefix("./").removeprefix("configs/").removesuffix(SUFFIX)
