"""Entries: estimators of this project, of anybody's file, and plain callables."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from torch import Generator, Tensor

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.settings import RecordsArguments
from lit_knn.estimators import Estimator
from lit_knn.index import Index
from lit_knn.reference import ReferenceSet

ADAPTERS = "lit_knn.referee.adapters"
Mean = Callable[[Tensor, Tensor, Generator], Tensor]
"""(z, t, generator) -> mean: t is (B,) float32, and all randomness comes from the generator."""
Make = Callable[[], tuple[Estimator, Index]]
"""Makes an estimator, not yet bound, and the index for it."""
# The files that `load_from_file` has loaded as modules of these names, as the user wrote them.
_own_files: dict[str, str] = {}


class OwnCallable(Estimator):
    """A callable `(z, t, generator) -> mean` of the user, or a class whose constructor takes the reference set.

    Args:
        target: the function or the class; or where it is, as in `my_file.py:name`.
    """

    def __init__(self, target: Any) -> None:
        self.target = load_from_file(target) if isinstance(target, str) else target
        self.kind = target if isinstance(target, str) else _class_path(target)
        self.function: Mean | None = None if inspect.isclass(self.target) else self.target
        self.referee_note = getattr(self.target, "referee_note", "")
        self.deterministic = bool(getattr(self.target, "deterministic", False))

    def bind(self, reference: ReferenceSet) -> Self:
        """Bind, and make the object if the target is a class."""
        super().bind(reference)
        if self.function is None:
            self.function = self.target(reference)
        return self

    def call(self, z: Tensor, t: Tensor, generator: Generator | None) -> Tensor:
        """Call the user's code with these very tensors."""
        assert self.function is not None
        mean = self.function(z, t, generator)  # type: ignore[arg-type]
        if isinstance(mean, Tensor) and not mean.is_floating_point():
            raise InputError(f"its estimate must be of a float type, got {mean.dtype}")
        return mean

    def _posterior_mean(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None) -> Tensor:
        return self.call(z, t.flatten().float(), generator)


def about(estimator: Estimator, index: Index | None = None, name: str | None = None) -> dict[str, str]:
    """Return the columns about an entry: its name, its settings as JSON, where it is from, and what it computes."""
    settings, module = _plain(estimator), type(estimator).__module__
    if index is not None:
        settings["index"] = _plain(index)
    origin = "lit_knn" if module.startswith("lit_knn.") and not isinstance(estimator, OwnCallable) else "own file"
    return {
        "name": name or _name(settings),
        "settings": json.dumps(settings),
        "origin": "adapter" if module.startswith(ADAPTERS) else origin,
        "note": str(getattr(estimator, "referee_note", "")),
    }


def _plain(value: Any) -> Any:
    """Turn settings into JSON's types; objects become class path and arguments."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, OwnCallable):
        return {"class_path": value.kind}
    if isinstance(value, RecordsArguments):
        return {"class_path": _class_path(type(value)), "init_args": _plain(value.given())}
    return str(value)


def _class_path(kind: Any) -> str:
    """Return a class path, short where the package exports the class, or `my_file.py:Name` for a file of the user."""
    kind = kind if hasattr(kind, "__qualname__") else type(kind)
    if kind.__module__ in _own_files:
        return f"{_own_files[kind.__module__]}:{kind.__qualname__}"
    package = kind.__module__.rpartition(".")[0]
    exported = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if exported else kind.__module__}.{kind.__qualname__}"


def _name(settings: dict[str, Any]) -> str:
    """Return a name such as `KNN(k=256, n=64), SQ8`, with arguments that are numbers or short texts."""

    def kind(thing: dict[str, Any]) -> str:
        path: str = thing["class_path"]
        return path if is_in_file(path) else path.rpartition(".")[2]

    index, arguments = settings.get("index"), settings.get("init_args", {}).items()
    short = {key: value for key, value in arguments if isinstance(value, (int, float, str)) and len(str(value)) <= 20}
    shown = ", ".join(f"{key}={value}" for key, value in short.items() if value is not False)
    name = kind(settings) + (f"({shown})" if shown else "")
    return f"{name}, {index['init_args'].get('factory') or kind(index)}" if index else name


def with_own_files(arguments: Sequence[str]) -> list[str]:
    """Load the values `my_file.py:Name` of a command line, and put class paths in their places."""
    words = [word for text in arguments for word in (text.split("=", 1) if text.startswith("--") else [text])]
    written = words[:1]
    for option, value in pairwise(words):
        if not option.startswith(("--estimator", "--index")) or not is_in_file(value):
            written.append(value)
            continue
        thing = load_from_file(value)
        if inspect.isclass(thing) and issubclass(thing, (Estimator, Index)):
            written.append(f"{thing.__module__}.{thing.__qualname__}")
        else:
            written += [f"{OwnCallable.__module__}.OwnCallable", f"{option}.target", value]
    return written


def is_in_file(text: str) -> bool:
    """Tell whether a text has the form `my_file.py:Name`."""
    return text.rpartition(":")[0].endswith(".py")


def load_from_file(text: str) -> Any:
    """Load `my_file.py:Name`."""
    place, _, name = text.rpartition(":")
    path = Path(place).expanduser()
    if not path.is_file():
        raise InputError(f"--estimator {text}: {path}: no such file")
    module_name = f"referee_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    _own_files[module_name] = place
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--estimator {text}: {path} fails: {type(error).__name__}: {first_line(error)}") from error
    if not callable(thing := getattr(module, name, None)):
        raise InputError(f"--estimator {text}: {path} has no class or function {name}")
    return thing
