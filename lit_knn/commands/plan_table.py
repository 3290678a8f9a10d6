"""Writes a plan: the memory of one rank, line by line, and whether each memory is large enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

GB = 1e9


@dataclass(frozen=True)
class Part:
    """One line of a plan: what takes the memory, the bytes on one rank, and further information."""

    name: str
    bytes: int
    note: str = ""
    temporary: bool = False  # needed only while the run starts
    shared: bool = False  # the ranks of a machine share one copy
    counted: bool = True  # the size is known; otherwise `bytes` is 0
    estimated: bool = False  # the size is a guess

    def __str__(self) -> str:
        return f"  {self.name:26}{self.bytes / GB:8.3f} GB  {self.note}".rstrip()


class Need(NamedTuple):
    """Holds the bytes that a run needs of one memory, and those that there are."""

    memory: str
    needed: float  # in bytes
    available: float | None  # in bytes; None if it is not known

    @property
    def fits(self) -> bool:
        """Tells whether the need is met, as far as it is known."""
        return self.available is None or self.needed <= self.available


@dataclass(frozen=True)
class Plan:
    """The planned memory of one rank; unknown memories are None."""

    device: torch.device
    parts: list[Part]  # on the device
    host: list[Part]  # what a run on a GPU holds in the machine's memory while it starts
    device_memory: float | None
    host_memory: float | None
    ranks: int  # processes that share the machine
    elsewhere: bool = False  # the device belongs to another machine, as the user described it

    @property
    def total(self) -> int:
        """Total bytes of one rank on its device."""
        return sum(part.bytes for part in self.parts)

    @property
    def needed(self) -> list[Need]:
        """The needs of each memory. On a CPU the machine's memory is the only one."""
        if self.device.type == "cpu":
            return [Need("the machine", self._bytes_of_ranks(self.parts), self.host_memory)]

        return [
            Need("each device", self.total, self.device_memory),
            Need("the machine", self._bytes_of_ranks(self.host), self.host_memory),
        ]

    @property
    def fits(self) -> bool:
        """Tells whether everything fits, as far as it is known."""
        return all(need.fits for need in self.needed)

    def __str__(self) -> str:
        device = self.device.type
        if self.elsewhere:
            size = (self.device_memory or 0) / GB
            device = f"a GPU of {size:g} GB that is given, not found here"

        lines = [f"Each of {self.ranks} rank(s) of a machine, on {device}:"]
        lines += map(str, self.parts)
        lines.append(str(Part("total", self.total)))

        if self.device.type != "cpu":
            lines.append("  and in the memory of the machine, until it is on the device:")
            lines += map(str, self.host)

        lines.append("Not counted: activations of the network, which grow with the batch.")
        for need in self.needed:
            lines.append(f"{need.needed / GB:.2f} GB on {need.memory}, {self._verdict(need)}")
        return "\n".join(lines)

    def _verdict(self, need: Need) -> str:
        if need.available is None:
            return "whose memory is not known"

        verdict = "DOES NOT FIT"
        if need.fits:
            verdict = "fits"
            if not all(part.counted for part in self.parts):
                verdict += ", apart from what is NOT KNOWN"
        return f"which has {need.available / GB:.2f} GB: {verdict}"

    def _bytes_of_ranks(self, parts: Sequence[Part]) -> float:
        """Sum parts over the ranks of a machine, which hold each shared part once."""
        held = 0
        for part in parts:
            copies = 1 if part.shared else self.ranks
            held += copies * part.bytes
        return held
