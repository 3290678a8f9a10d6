"""Counts of what happens on the pretended device, by source line."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.pretend_cuda.arguments import leaves
from tests.pretend_cuda.operations import GATHERS, Op

HERE = str(Path(__file__).parent)


class Seen:
    """Counts what happens while it records.

    Attributes:
        ops: operations, a stand-in for kernel launches.
        op_names, op_sites: operations by name and by source line.
        sync_kinds, sync_sites: waits of the host for the device, by kind, and by (kind, source line).
        async_copies: copies to the device that do not wait.
        bytes, site_bytes: bytes read and written.
        flops: multiplications and additions of products, by type.
    """

    def __init__(self) -> None:
        self.ops = self.async_copies = self.bytes = 0
        self.op_names: Counter = Counter()
        self.op_sites: Counter = Counter()
        self.sync_kinds: Counter = Counter()
        self.sync_sites: Counter = Counter()
        self.site_bytes: Counter = Counter()
        self.flops: Counter = Counter()

    @property
    def syncs(self) -> int:
        """Times that the host waits for the device."""
        return sum(self.sync_kinds.values())

    def report(self, sites: int = 12) -> str:
        """One line of sums, then the source lines that synchronise."""
        flops = {kind: round(count / 1e9, 3) for kind, count in self.flops.items()}
        sums = f"ops {self.ops}  syncs {self.syncs} {dict(self.sync_kinds)}  MB {self.bytes / 1e6:.1f}  GFLOP {flops}"
        lines = [f"   {n:4d} x {kind:12s} {site}" for (kind, site), n in self.sync_sites.most_common(sites)]
        return "\n".join([sums, *lines])


class Counts:
    """Passes on what happens to all recordings in progress.

    Args:
        project: folder whose source lines are named; None names the innermost line outside PyTorch.
    """

    def __init__(self, project: str | None) -> None:
        self.project = None if project is None else str(Path(project).resolve())
        self.recorders: list[Seen] = []

    def sync(self, kind: str) -> None:
        if self.recorders:
            site = self.site()
            for seen in self.recorders:
                seen.sync_kinds[kind] += 1
                seen.sync_sites[kind, site] += 1

    def copy(self, from_device: bool, to_device: bool, non_blocking: bool) -> None:
        """A copy between the devices waits, unless it goes to the device and need not."""
        if from_device == to_device:
            return
        if non_blocking and to_device:
            for seen in self.recorders:
                seen.async_copies += 1
        else:
            self.sync("D2H" if from_device else "H2D")

    def operation(self, name: str, moved: int = 0, flops: tuple[str, int] | None = None) -> None:
        site = self.site() if self.recorders else ""
        for seen in self.recorders:
            seen.ops += 1
            seen.op_names[name] += 1
            seen.op_sites[site] += 1
            seen.bytes += moved
            seen.site_bytes[site] += moved
            if flops is not None:
                seen.flops[flops[0]] += flops[1]

    def site(self) -> str:
        """The innermost line outside PyTorch and the stand-in, and the line of the project that led there."""
        frame, first = sys._getframe(2), None
        while frame is not None:
            code, file = frame.f_code, frame.f_code.co_filename
            ours = self.project is not None and file.startswith(self.project) and "site-packages" not in file
            foreign = file.startswith((HERE, "<")) or "/torch/" in file
            if (ours or first is None) and not foreign:
                short = file[len(self.project or "") :].lstrip("/") if ours else "/".join(file.split("/")[-3:])
                line = f"{short}:{frame.f_lineno} {code.co_name}"
                if ours or self.project is None:
                    return line if first is None else f"{first} < {line}"
                first = line
            frame = frame.f_back
        return first or "?"


def moved_bytes(op: Op, given: list, out: Any) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(map(_bytes, _tensors(out)))
    if op.name in GATHERS:
        return 2 * written
    read = _tensors(given)
    if op.name == "aten::copy_":
        read = read[1:]  # the first one is written
    if op.name == "aten::sum" and not _sums_as_stored(given[0].dtype, out.dtype):
        written += 2 * given[0].numel() * out.element_size()  # a copy is written and read
    return written + sum(map(_bytes, read))


def _sums_as_stored(stored: torch.dtype, summed: torch.dtype) -> bool:
    """Tell whether CUDA sums these values in another type without a copy in this type."""
    return stored == summed or (stored in (torch.float16, torch.bfloat16) and summed == torch.float32)


def flops_of(op: Op, args: tuple, kwargs: dict, out: Any) -> tuple[str, int] | None:
    """The type and the multiplications and additions of a product; None for others."""
    if op.flops is None:
        return None
    return str(args[0].dtype).removeprefix("torch."), op.flops(*args, **kwargs, out_val=out)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(t: torch.Tensor) -> int:
    """Bytes of the elements that are different places in memory."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride != 0 else 1
    return count * t.element_size()
