"""Sealed stand-ins for what a pickle names: it could set attributes on anything else that it has got hold of."""

import pickle
from collections.abc import Callable
from typing import Any

MAX_DIMENSIONS = 16


class Refused(pickle.UnpicklingError):
    """The pickle asks for something it is not given; says what."""


class _Sealed(type):
    """Metaclass of types whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused("sets an attribute of a class, which is refused")


class Inert(metaclass=_Sealed):
    """Base of everything a pickle can get hold of beside plain containers, numbers and text."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise Refused(f"sets the state of {type(self).__name__}, which is refused")


class Record(Inert):
    """What was an object: the name of its class, without the module (empty for PyTorch's own), and its attributes."""

    __slots__ = ("class_name", "state")

    class_name: str
    state: dict[str, Any]

    def __new__(cls) -> "Record":
        """Unpickling calls `__new__` alone."""
        self = super().__new__(cls)
        self.class_name, self.state = "", {}
        return self

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise Refused("sets the state of an object to something other than a dict, which is refused")
        self.state = state


class InertDict(dict, metaclass=_Sealed):
    """What was a dict of another class; drops attributes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """A pickle could otherwise put its own `items` in the place of the method."""


class Function(Inert):
    """A function without attributes to set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        """Call it; a pickle has positional arguments alone."""
        return self._call(*args)


class Name(Inert):
    """A global that is only compared with."""

    __slots__ = ()


def is_size(number: object) -> bool:
    """Whether a number from a file can be a size or an offset."""
    return type(number) is int and 0 <= number < 2**48


def printable(text: object) -> str:
    """One line without control characters, whatever a file calls its globals."""
    return str(text)[:200].encode("unicode_escape").decode("ascii")
