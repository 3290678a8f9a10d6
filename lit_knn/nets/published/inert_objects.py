"""Sealed stand-ins for the objects that a pickle names. On unsealed objects, a pickle could set attributes."""

import pickle
from collections.abc import Callable
from typing import Any

MAX_DIMENSIONS = 16


class Refused(pickle.UnpicklingError):
    """The pickle asks for something that is refused; the message says what."""


class _Sealed(type):
    """Metaclass that keeps a pickle from setting attributes of a class."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise Refused("sets an attribute of a class, which is refused")


class Inert(metaclass=_Sealed):
    """Base of all objects that a pickle can reach, except plain containers, numbers and text."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise Refused(f"sets the state of {type(self).__name__}, which is refused")


class Record(Inert):
    """Stand-in for an object: its attributes and its class name, without the module (empty for PyTorch's classes)."""

    __slots__ = ("class_name", "state")

    class_name: str
    state: dict[str, Any]

    def __new__(cls) -> "Record":
        """Make an empty record here, because unpickling does not call `__init__`."""
        self = super().__new__(cls)
        self.class_name, self.state = "", {}
        return self

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise Refused("sets the state of an object to something other than a dict, which is refused")
        self.state = state


class InertDict(dict, metaclass=_Sealed):
    """Stand-in for an object of a dict subclass; it drops attributes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Ignore the state, because a pickle could use it to replace methods such as `items`."""


class Function(Inert):
    """A function whose attributes a pickle cannot set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        """Call the function; a pickle passes only positional arguments."""
        return self._call(*args)


class Name(Inert):
    """A global that is only compared, never called."""

    __slots__ = ()


def is_size(number: object) -> bool:
    """Tells whether a number from a file can be a size or an offset."""
    return type(number) is int and 0 <= number < 2**48


def printable(text: object) -> str:
    """Escape the first 200 characters of a file's text, so that it prints as one line without control characters."""
    return str(text)[:200].encode("unicode_escape").decode("ascii")
