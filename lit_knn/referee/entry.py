"""Entries: estimators of this project, of anybody's file, and plain callables."""

import copy
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.settings import RecordsArguments
from lit_knn.estimators import Estimator
from lit_knn.index import Index, exact_index
from lit_knn.reference import ReferenceSet

ADAPTERS = "lit_knn.referee.adapters"
Mean = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""(z, t, generator) -> mean: t is (B,) float32, and all randomness comes from the generator."""


class OwnCallable(Estimator):
    """A callable `(z, t, generator) -> mean` of the user, or a class whose constructor takes the reference set.

    Args:
        target: the function or the class.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.function: Mean | None = None if inspect.isclass(target) else target
        self.referee_note = getattr(target, "referee_note", "")
        self.deterministic = bool(getattr(target, "deterministic", False))

    def bind(self, reference: ReferenceSet) -> Self:
        """Makes the object of a class."""
        super().bind(reference)
        if self.function is None:
            self.function = self.target(reference)
        return self

    def call(self, z: Tensor, t: Tensor, generator: torch.Generator | None) -> Tensor:
        """Call the user's code with these very tensors."""
        if self.function is None:
            raise InputError(f"{self.target.__name__} is used before bind(reference)")
        mean = self.function(z, t, generator)  # type: ignore[arg-type]
        if isinstance(mean, Tensor) and not mean.is_floating_point():
            raise InputError(f"its estimate must be of a float type, got {mean.dtype}")
        return mean

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self.call(z, t.flatten().float(), generator)


@dataclass(frozen=True)
class Entry:
    """An estimator that is measured.

    Attributes:
        name: its name in the table.
        settings: JSON: class path and arguments.
        origin: "lit_knn", "own file" or "adapter".
        note: what it really computes; may be empty.
        make: makes the estimator, not yet bound, and the index for it. It can be pickled.
    """

    name: str
    settings: str
    origin: str
    note: str
    make: Callable[[], tuple[Estimator, Index]]


def entry_of(estimator: Estimator | Mean | type, index: Index | None = None, name: str | None = None) -> Entry:
    """Make an entry from an object: an estimator that is not bound, a callable, or a class that takes the images."""
    made = estimator if isinstance(estimator, Estimator) else OwnCallable(estimator)
    kind = made.target if isinstance(made, OwnCallable) else type(made)
    return _entry(made, index, _kind_name(kind), name, partial(_copies, made, index))


def entry_from_arguments(arguments: Sequence[str], name: str | None = None) -> Entry:
    """Make an entry from the options --estimator and --index.

    Raises:
        InputError: a file, class or argument does not exist or is refused.
    """
    made, index = from_arguments(arguments)
    named = next((text for text in _values(arguments, "--estimator") if _in_file(text)), None)
    kind = named or _kind_name(type(made))
    given = index if _values(arguments, "--index") else None
    return _entry(made, given, kind, name, partial(from_arguments, tuple(arguments)))


def from_arguments(arguments: Sequence[str]) -> tuple[Estimator, Index]:
    """Make the estimator and the index that the options name."""
    from jsonargparse import ArgumentParser

    # A class of the user's file becomes a class path of an imported module.
    arguments, found = _with_own_files(arguments)
    if found is not None and not (inspect.isclass(found) and issubclass(found, Estimator)):
        if extra := [text for text in arguments if text.startswith("--estimator.")]:
            raise InputError(f"{extra[0]}: only a subclass of Estimator takes arguments, {found.__name__} is none")
        arguments = _without(arguments, "--estimator")
    elif found is not None and (lacking := sorted(found.__abstractmethods__)):
        raise InputError(f"--estimator: {found.__name__} does not implement {', '.join(lacking)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Estimator, "estimator", required=False)
    parser.add_subclass_arguments(Index, "index", required=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = parser.parse_args(list(arguments))
            make = getattr(parser, "instantiate", None) or parser.instantiate_classes
            made = make(config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--estimator: {' '.join(str(error).split())[:400]}") from error
    estimator = getattr(made, "estimator", None) if found is None or inspect.isclass(found) else None
    if estimator is None:
        if found is None:
            raise InputError("--estimator is missing: give a class path, a .yaml file or my_file.py:Name")
        estimator = OwnCallable(found)
    return estimator, getattr(made, "index", None) or exact_index()


def _entry(made: Estimator, index: Index | None, kind: str, name: str | None, make: Any) -> Entry:
    settings: dict[str, Any] = {"class_path": kind}
    if not isinstance(made, OwnCallable):
        settings["init_args"] = _plain(made.given())
    if index is not None:
        settings["index"] = {"class_path": _kind_name(type(index)), "init_args": _plain(index.given())}
    inside = _kind_name(type(made))
    origin = "own file" if not inside.startswith("lit_knn.") or isinstance(made, OwnCallable) else "lit_knn"
    origin = "adapter" if inside.startswith(ADAPTERS) else origin
    note = str(getattr(made, "referee_note", ""))
    return Entry(name or _short_name(kind, settings), json.dumps(settings), origin, note, make)


def _short_name(kind: str, settings: dict[str, Any]) -> str:
    """Return a name such as `KNN(k=256, n=64), SQ8`, with arguments that are numbers or texts."""
    base = kind if _in_file(kind) else kind.rpartition(".")[2]
    arguments = settings.get("init_args", {}).items()
    shown = [f"{key}={value}" for key, value in arguments if value not in (None, False) and not _long(value)]
    index = settings.get("index")
    ending = f", {index['init_args'].get('factory') or index['class_path'].rpartition('.')[2]}" if index else ""
    return base + (f"({', '.join(shown)})" if shown else "") + ending


def _long(value: Any) -> bool:
    return not isinstance(value, (int, float, str)) or (isinstance(value, str) and len(value) > 20)


def _plain(value: Any) -> Any:
    """Turn settings into JSON's types; objects become class path and arguments."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, RecordsArguments):
        return {"class_path": _kind_name(type(value)), "init_args": _plain(value.given())}
    return str(value)


def _kind_name(kind: Any) -> str:
    """Return a class path, shortened like `lit_knn.estimators.KNN` where the package exports the class."""
    name, package = kind.__qualname__, kind.__module__.rpartition(".")[0]
    exported = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if exported else kind.__module__}.{name}"


def _copies(estimator: Estimator, index: Index | None) -> tuple[Estimator, Index]:
    return copy.deepcopy(estimator), exact_index() if index is None else copy.deepcopy(index)


def _values(arguments: Sequence[str], option: str) -> list[str]:
    """Return the values of an option, given as `--option value` or `--option=value`."""
    separate = [value for key, value in pairwise(arguments) if key == option]
    return separate + [text.partition("=")[2] for text in arguments if text.startswith(f"{option}=")]


def _in_file(text: str) -> bool:
    return text.rpartition(":")[0].endswith(".py")


def _with_own_files(arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Load `my_file.py:Name` values. Return the arguments with class paths in place, and what --estimator names."""
    found, changed = None, []
    for place, text in enumerate(arguments):
        option, equals, value = text.rpartition("=") if text.startswith("--") else ("", "", text)
        if _in_file(value):
            thing = load_from_file(value)
            text = f"{option}{equals}{thing.__module__}.{getattr(thing, '__name__', '')}"
            if "--estimator" in (option, arguments[place - 1]):
                found = thing
        changed.append(text)
    return changed, found


def _without(arguments: Sequence[str], option: str) -> list[str]:
    kept, skip = [], False
    for text in arguments:
        if not skip and text != option and not text.startswith(f"{option}="):
            kept.append(text)
        skip = text == option
    return kept


def load_from_file(text: str) -> Any:
    """Load `my_file.py:Name`.

    Raises:
        InputError: the file does not exist, fails, or does not have the name.
    """
    place, _, name = text.rpartition(":")
    path = Path(place).expanduser()
    if not path.is_file():
        raise InputError(f"--estimator {text}: {path}: no such file")
    module_name = f"referee_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--estimator {text}: {path} is no Python file")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--estimator {text}: {path} fails: {type(error).__name__}: {first_line(error)}") from error
    thing = getattr(module, name, None)
    if not callable(thing) and not isinstance(thing, Estimator):
        raise InputError(f"--estimator {text}: {path} has no class or function {name}")
    return thing
