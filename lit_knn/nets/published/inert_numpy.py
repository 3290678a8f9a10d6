"""NumPy values in a pickle: scalars become plain numbers, and arrays become inert records.

NVIDIA's code stores NumPy scalars among its constructor arguments (`skip_scale=np.sqrt(0.5)`). NumPy 1 has the
functions in `numpy.core`, NumPy 2 in `numpy._core`. Element types other than `ELEMENT_TYPES` are refused.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lit_knn.nets.published.inert_objects import MAX_DIMENSIONS, Function, Inert, Name, Refused, is_size, printable

Order = Literal["C", "F"]
# Booleans, integers and floats by kind and number of bytes. `object` and structured types could hold other objects.
ELEMENT_TYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


class ElementType(Inert):
    """Stand-in for a `numpy.dtype` of `ELEMENT_TYPES`; `__setstate__` adds its byte order."""

    __slots__ = ("byte_order", "code")

    def __init__(self, code: str) -> None:
        self.code, self.byte_order = code, ""

    def __setstate__(self, state: object) -> None:
        """Set the byte order, only once: a second one would change values that were read before."""
        orders = ("|",) if self.nbytes == 1 else ("<", ">")
        plain = [order for order in orders if state == (3, order, None, None, None, -1, -1, 0)]
        if self.byte_order or not plain:
            raise Refused(f"sets more of the NumPy type {self.code} than its byte order, which is refused")
        self.byte_order = plain[0]

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return int(self.code[1:])

    def to_numpy(self) -> np.dtype[Any]:
        """The NumPy type."""
        return np.dtype(self.byte_order + self.code)


class ArrayRecord(Inert):
    """Parts of an array, with its values as bytes; empty until its state is set."""

    __slots__ = ("axes", "element", "order", "shape", "values")

    def __init__(self) -> None:
        self.element: ElementType | None = None
        self.shape: tuple[int, ...] = (0,)

    def __setstate__(self, state: object) -> None:
        """Set the array from (version, shape, element type, whether the first axis runs fastest, values)."""
        if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1 or type(state[3]) is not bool:
            raise Refused("sets the state of an array in an unknown format, which is refused")
        if self.element is not None:
            raise Refused("sets the state of an array twice, which is refused")
        self.fill(state[4], state[2], state[1], "F" if state[3] else "C")

    def fill(self, values: object, element: object, shape: object, order: Order, axes: object = None) -> None:
        """Check all parts against each other, then store them."""
        checked = _checked_element(element)
        if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or not all(map(is_size, shape)):
            raise Refused("holds an array of an impossible size, which is refused")
        if not isinstance(values, bytes | bytearray) or len(values) != math.prod(shape) * checked.nbytes:
            raise Refused("holds an array with too many or too few values, which is refused")
        self.axes = None if axes is None else _checked_axes(axes, len(shape))
        # A view copies nothing, even if a pickle names the values many times, and no pickle can then resize them.
        self.element, self.shape, self.order, self.values = checked, shape, order, memoryview(values)

    @property
    def count(self) -> int:
        """Number of elements, where an empty dimension counts as 1. `tolist` makes at most so many lists a level."""
        return math.prod(max(n, 1) for n in self.shape)

    def tolist(self) -> Any:
        """Convert to nested lists of plain numbers; an array without dimensions becomes one number."""
        if self.element is None:
            return []
        array = np.ndarray(self.shape, self.element.to_numpy(), self.values, order=self.order)
        return (array if self.axes is None else array.transpose(self.axes)).tolist()


def _checked_element(element: object) -> ElementType:
    if not isinstance(element, ElementType) or not element.byte_order:
        raise Refused("holds NumPy values without an element type, which is refused")
    return element


def _checked_axes(axes: object, dimensions: int) -> tuple[int, ...]:
    if not isinstance(axes, tuple) or not all(map(is_size, axes)) or sorted(axes) != list(range(dimensions)):
        raise Refused("holds an array with impossible axes, which is refused")
    return axes


def _dtype(code: object, *options: object) -> ElementType:
    """Stand-in for `numpy.dtype(code, align, copy)`; the options change nothing for numbers."""
    if not isinstance(code, str) or code not in ELEMENT_TYPES:
        raise Refused(f"holds values of the NumPy type {printable(code)}, which is refused")
    return ElementType(code)


def _scalar(element: object, value: object) -> object:
    """Stand-in for `numpy.core.multiarray.scalar`."""
    checked = _checked_element(element)
    if not isinstance(value, bytes) or len(value) != checked.nbytes:
        raise Refused("holds a NumPy scalar with too many or too few bytes, which is refused")
    return np.frombuffer(value, checked.to_numpy())[0].item()


def _reconstruct(kind: object, shape: object, code: object) -> ArrayRecord:
    """Stand-in for `numpy.core.multiarray._reconstruct`: makes an empty array; its state follows."""
    if kind is not NDARRAY or shape != (0,) or code != b"b":
        raise Refused("reconstructs something other than a plain array, which is refused")
    return ArrayRecord()


def _frombuffer(values: object, element: object, shape: object, order: object, axes: object = None) -> ArrayRecord:
    """Stand-in for `numpy.core.numeric._frombuffer` (pickle protocol 5); order K permutes axes of a C-order array."""
    if order not in ("C", "F", "K") or (axes is None) != (order != "K"):
        raise Refused("holds an array in an unknown order, which is refused")
    array = ArrayRecord()
    array.fill(values, element, shape, "F" if order == "F" else "C", axes)
    return array


NDARRAY = Name()
NUMPY_GLOBALS: Mapping[tuple[str, str], object] = {
    ("numpy", "dtype"): Function(_dtype),
    ("numpy", "ndarray"): NDARRAY,
    **{
        (f"numpy.{core}.{module}", name): Function(function)
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "scalar", _scalar),
            ("multiarray", "_reconstruct", _reconstruct),
            ("numeric", "_frombuffer", _frombuffer),
        )
    },
}
