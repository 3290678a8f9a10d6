"""One worker: it trains the runs that the table lacks and that no other process is training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from lit_knn.common.errors import InputError
from lit_knn.common.files import try_lock
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import Row

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
        """Return the fingerprint of the images, network, lengths, estimators and options of a run, and of its start.

        What the name of a module fixes, such as its loss, is not in it.
        """
        lengths, kind = self.image_set.lengths, KINDS[run.module]
        net = {
            name: list(tensor.shape)
            for name, tensor in self.image_set.net(**kind.net_options).state_dict().items()
        }
        reference = self.images.training
        parts = [reference.fingerprint(), lengths._asdict(), describe(reference.index), net]
        plug_ins = {
            name: part if isinstance(part, str) else describe(part)
            for name, part in targets(run.set, run.module)[run.estimator]().items()
        }
        parts += [plug_ins, kind.options(kind.steps(lengths))]
        start = before(run)
        return fingerprint([*parts, self.settings(start)] if start else parts)

    def run_all(self, runs: list[Run]) -> None:
        """Train the missing runs in this order, each after the run that it tunes, until the table has all of them.

        Raises:
            InputError: the table has rows of a run with other settings, or a run is too short for its measurements.
        """
        starts = dict.fromkeys(start for run in runs if (start := before(run)))
        self._check_measurements([*starts, *runs])
        self.table.check({run: self.settings(run) for run in [*starts, *runs]})
        while True:
            finished = self.table.finished()
            missing = [run for run in runs if run not in finished]
            if not missing:
                return
            if not any(self._train_next(run) for run in missing):
                # Other processes are at all of them.
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _check_measurements(self, runs: list[Run]) -> None:
        """Raise InputError if the measurements of a run are not evenly spaced up to its last step."""
        measurements = self.image_set.lengths.measurements
        for module in dict.fromkeys(run.module for run in runs):
            steps = KINDS[module].steps(self.image_set.lengths)
            if steps < measurements or steps % measurements:
                raise InputError(
                    f"--measurements {measurements} must divide the steps of {module}, {steps}"
                )

    def _train_next(self, run: Run) -> bool:
        """Train a run, or first the one that it tunes. Return False if another process is at it."""
        start = before(run)
        if start is not None and not self._ended(start):
            with claimed(self._folder(start)) as free:
                # Another process may have ended it in the meantime.
                if free and not self._ended(start):
                    self._train(start)
            return free

        with claimed(self._folder(run)) as free:
            if free and run not in self.table.finished():
                self._train(run)
        return free

    def _folder(self, run: Run) -> Path:
        return self.folder / f"{run}-{self.settings(run)}"

    def _checkpoint(self, run: Run) -> Path:
        return self._folder(run) / LAST_NAME

    def _ended(self, run: Run) -> bool:
        path, steps = self._checkpoint(run), KINDS[run.module].steps(self.image_set.lengths)
        return path.exists() and bool(
            torch.load(path, weights_only=True, mmap=True)["global_step"] == steps
        )

    def _train(self, run: Run) -> None:
        kind, begun, tuned = KINDS[run.module], time.process_time(), before(run)
        print(f"{run}: training, {kind.steps(self.image_set.lengths):,} steps", flush=True)
        # Another run needs its checkpoint, which is not on this machine.
        if run in self.table.finished():
            train(run, self.image_set, None, self.images.training, self._folder(run))
            return
        if run.module not in self._measurements:
            self._measurements[run.module] = self._measurements_of(kind)
        start = self._checkpoint(tuned) if tuned else None
        measurements, folder = self._measurements[run.module], self._folder(run)
        pictures = self.table.pictures(run) if run.seed == 0 else None
        rows_of_runs = train(
            run, self.image_set, measurements, self.images.training, folder, start, pictures
        )
        for each, rows in rows_of_runs.items():
            more: Row = {
                "images_before": self._images_of(tuned) if tuned else 0,
                "settings": self.settings(run),
                # The last row names all hardware of the training.
                "hardware": rows[-1]["hardware"],
            }
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


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Make a folder, and yield whether no other process has claimed it.

    The system frees the claim when a process ends, so an interrupted run is free again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".claim").open("w") as file:
        yield try_lock(file)
