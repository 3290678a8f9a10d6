"""The stack machine that runs pickles of EDM's networks. It calls only the functions that it is given.

A pickle is a program for a stack machine. Python's machine imports and calls what the program names, and sets
attributes. The machine here makes plain values, and looks up no name of the file but in its own table.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

# A value that a pickle makes.
Value = Any

# Opcodes that push their argument.
ARGUMENTS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
}
# Opcodes that push a constant.
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# Opcodes that push a new, empty container.
CONTAINERS: Mapping[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
# Opcodes without an effect here. Frames only help to read ahead. BINPERSID would replace the tuple that names a storage
# by the storage; here the tuple stays.
IGNORED = {"PROTO", "FRAME", "BINPERSID"}
# Number of items that an opcode takes off the stack, to make a tuple of them or to put them into a container.
SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}


class Refused(Exception):
    """The pickle asks for something that is refused; the message says what."""


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of the file: the name of its class, without the module, and the object's state."""

    class_name: str
    state: Value = None


class PickleMachine:
    """Runs one pickle.

    Args:
        functions: what stands in for the globals that the file may call, by their names.
        values: globals that the file may name, but not call.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., object]], values: Mapping[str, object]
    ) -> None:
        self.functions = functions
        self.values = values
        self.stack: list[Value] = []  # what is above the last mark
        self.below: list[list[Value]] = []  # the stacks below the marks
        self.memo: dict[int, Value] = {}

    def run(self, stream: BinaryIO) -> Value:
        """Run the pickle at the current position of `stream`, and stop after it."""
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                break
            if not self._push(opcode.name, argument):
                self._combine(opcode.name)
        return self.stack.pop()

    def _push(self, name: str, argument: Value) -> bool:
        """Run an opcode that adds to the stack or remembers its top; return False for others."""
        stack = self.stack
        if name in ARGUMENTS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in CONTAINERS:
            stack.append(CONTAINERS[name]())
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            place = len(self.memo) if argument is None else argument
            self.memo[place] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "GLOBAL":
            stack.append(self._known(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(self._known(".".join(self._popped(2))))
        else:
            return False
        return True

    def _combine(self, name: str) -> None:
        """Run an opcode that combines what is on the stack."""
        if name == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS"):
            items, self.stack = self.stack, self.below.pop()
            self._collect(name, items)
        elif name in SIZES:
            self._collect(name, self._popped(SIZES[name]))
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = self._popped(2)
            self.stack.append(self.functions[function](*arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            self.stack[-1].state = state  # Only a `PickledObject` has or takes this attribute.
        elif name not in IGNORED:
            raise Refused(f"uses the pickle opcode {name}")

    def _known(self, name: str) -> str:
        """Return the name of a global if it is among the functions and values; refuse others."""
        if name not in self.functions and name not in self.values:
            raise Refused(f"names the global {name}")
        return name

    def _popped(self, count: int) -> list[Value]:
        """Remove the last `count` items of the stack, and return them; IndexError if it has fewer."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def _collect(self, name: str, items: list[Value]) -> None:
        """Make a tuple of the items, or put them into the container on top of the stack."""
        if name.startswith("TUPLE"):
            self.stack.append(tuple(items))
        elif name.startswith("APPEND"):
            self.stack[-1].extend(items)
        elif name.startswith("SETITEM"):
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            self.stack[-1].update(items)
