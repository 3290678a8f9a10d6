"""One worker: it trains the runs that the table lacks and that no other process is training."""

import time
from collections import deque
from pathlib import Path

import torch

from benchmarks.learning_curves.grid import Run, targets
from benchmarks.learning_curves.kind import Kind, LatentKind
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.measurements import Measurements
from benchmarks.learning_curves.quality import Quality
from benchmarks.learning_curves.sample_measurements import SampleMeasurements
from benchmarks.learning_curves.sets import ImageSet
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.training import train
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import Row
from lit_knn.runs.clock import hardware_name

SECONDS_BETWEEN_LOOKS = 20


class Worker:
    """Trains runs of one set.

    Args:
        image_set: the set.
        table: where the rows go.
        folder: where the checkpoints are.
    """

    def __init__(self, image_set: ImageSet, table: CurveTable, folder: Path) -> None:
        self.image_set, self.table, self.folder = image_set, table, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.images = image_set.images()
        kept = folder / f"real_features_{self.images.real.fingerprint()[:12]}.npy"
        self.quality = Quality(self.images, image_set.extractor, kept)
        self._measurements: dict[str, SampleMeasurements] = {}

    def settings(self, run: Run) -> str:
        """Return the fingerprint of everything that a run's numbers depend on, except its name in the table."""
        lengths, kind = self.image_set.lengths, KINDS[run.module]
        net = {
            name: list(tensor.shape)
            for name, tensor in self.image_set.net(**kind.net_options).state_dict().items()
        }
        reference = self.images.training
        parts = [reference.fingerprint(), lengths._asdict(), describe(reference.index), net]
        own = {
            name: part if isinstance(part, str) else describe(part)
            for name, part in targets(run.set, run.module)[run.estimator]().items()
        }
        parts += [own, kind.options(kind.steps(lengths))]
        start = before(run)
        return fingerprint([*parts, self.settings(start)] if start else parts)

    def run_all(self, runs: list[Run]) -> None:
        """Train the missing runs in this order. A run that tunes another one waits until that one has ended.

        Raises:
            InputError: the table has rows of a run with other settings.
        """
        self.table.check({run: self.settings(run) for run in runs})
        waiting, idle = deque(runs), 0
        while waiting:
            run = waiting.popleft()
            if self._may_start(run):
                with self.table.claimed(run) as mine:
                    if mine:
                        self._train(run)
                idle = 0
            else:
                waiting.append(run)
                idle += 1
            if idle > len(waiting):
                time.sleep(SECONDS_BETWEEN_LOOKS)
                idle = 0

    def _may_start(self, run: Run) -> bool:
        """Train the run that this one tunes, if nobody else does. Tells whether that run has ended."""
        start = before(run)
        if run in self.table.finished() or start is None or self._ended(start):
            return True
        with self.table.claimed(start, finished_too=True) as mine:
            if mine and not self._ended(start):
                self._train(start)
        return self._ended(start)

    def _checkpoint(self, run: Run) -> Path:
        return self.folder / f"{run}-{self.settings(run)}" / LAST_NAME

    def _ended(self, run: Run) -> bool:
        path, steps = self._checkpoint(run), KINDS[run.module].steps(self.image_set.lengths)
        return path.exists() and bool(
            torch.load(path, weights_only=True, mmap=True)["global_step"] == steps
        )

    def _train(self, run: Run) -> None:
        kind, begun, tuned = KINDS[run.module], time.process_time(), before(run)
        # Another run needs its checkpoint, which is not on this machine.
        if run in self.table.finished():
            train(run, self.image_set, None, self.images.training, self._checkpoint(run).parent)
            return
        if run.module not in self._measurements:
            self._measurements[run.module] = self._measurements_of(kind)
        start = self._checkpoint(tuned) if tuned else None
        measurements, folder = self._measurements[run.module], self._checkpoint(run).parent
        pictures = self.table.pictures(run) if run.seed == 0 else None
        rows_of_runs = train(
            run, self.image_set, measurements, self.images.training, folder, start, pictures
        )
        more: Row = {
            "images_before": self._images_of(tuned) if tuned else 0,
            "settings": self.settings(run),
            "hardware": hardware_name(torch.device("cpu"), 1),
        }
        for each, rows in rows_of_runs.items():
            self.table.add(each, [{**each._asdict(), **row, **more} for row in rows])
        print(f"{run}: {time.process_time() - begun:.0f} s of CPU", flush=True)

    def _measurements_of(self, kind: Kind) -> SampleMeasurements:
        lengths = self.image_set.lengths
        if isinstance(kind, LatentKind):
            return Measurements(kind, self.images, lengths, self.quality)
        return SampleMeasurements(kind, lengths, self.quality)

    def _images_of(self, run: Run) -> int:
        kind, lengths = KINDS[run.module], self.image_set.lengths
        return kind.steps(lengths) * kind.batches * lengths.batch_size


def before(run: Run) -> Run | None:
    """Return the run whose network a tuning run starts from, or None for a run that starts from random weights."""
    tunes = KINDS[run.module].tunes
    return run._replace(module=tunes, estimator="OneSample") if tunes else None
