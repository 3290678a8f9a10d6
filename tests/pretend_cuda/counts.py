"""Counts the waits of the host for the pretended device, by source line."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

HERE = str(Path(__file__).parent)


class Seen:
    """Counts what happens while it records.

    Attributes:
        ops: operations on the device; 0 if nothing ran there.
        sync_sites: waits of the host for the device, by (kind, source line).
    """

    def __init__(self) -> None:
        self.ops = 0
        self.sync_sites: Counter = Counter()

    @property
    def syncs(self) -> int:
        """Times that the host waits for the device."""
        return self.sync_sites.total()

    def report(self, sites: int = 12) -> str:
        """The source lines that wait."""
        lines = [f"   {n:4d} x {kind:12s} {site}" for (kind, site), n in self.sync_sites.most_common(sites)]
        return "\n".join([f"operations {self.ops}, waits {self.syncs}", *lines])


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
                seen.sync_sites[kind, site] += 1

    def copy(self, from_device: bool, to_device: bool, non_blocking: bool) -> None:
        """A copy between the devices waits, unless it goes to the device and need not."""
        if from_device != to_device and not (non_blocking and to_device):
            self.sync("D2H" if from_device else "H2D")

    def operation(self) -> None:
        for seen in self.recorders:
            seen.ops += 1

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
