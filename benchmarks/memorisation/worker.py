"""One worker: it trains the runs that the table lacks and that no other process is training."""

import time
from pathlib import Path

import torch

from benchmarks.memorisation.runs import ESTIMATORS, Lengths, Run, image_sets, network
from benchmarks.memorisation.table import MemorisationTable
from benchmarks.memorisation.training import OPTIONS, Measurements, train
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.tables import Row
from lit_knn.runs.times import hardware_name


class Worker:
    """Trains runs.

    Args:
        table: where the rows go.
        lengths: how the runs are measured.
        folder: where the checkpoints are.
    """

    def __init__(self, table: MemorisationTable, lengths: Lengths, folder: Path) -> None:
        self.table, self.lengths, self.folder = table, lengths, folder

    def settings(self, run: Run) -> str:
        """Return the fingerprint of everything that a run's numbers depend on, except its name in the table."""
        sets = image_sets(run.N, run.seed, self.lengths.held_out)
        net = {name: list(tensor.shape) for name, tensor in network().state_dict().items()}
        estimator = describe(ESTIMATORS[run.estimator]())
        return fingerprint([[each.fingerprint() for each in sets], self.lengths._asdict(), net, estimator, OPTIONS])

    def run_all(self, runs: list[Run]) -> None:
        """Train the missing runs in this order.

        Raises:
            InputError: the table has rows of a run with other settings.
        """
        settings = {run: self.settings(run) for run in runs}
        self.table.check(settings)
        for run in runs:
            with self.table.claimed(run) as mine:
                if mine:
                    self._train(run, settings[run])

    def _train(self, run: Run, settings: str) -> None:
        start = time.process_time()
        more: Row = {**run._asdict(), "settings": settings, "hardware": hardware_name(torch.device("cpu"), 1)}

        def put(rows: list[Row]) -> bool:
            self.table.put(run, [{**more, **row} for row in rows])
            last = rows[-1]
            print(
                f"{run}: step {last['step']}, {float(last['copied_fraction']):.1%} copied, "
                f"fd_pixels {float(last['fd_pixels']):.3f}, {time.process_time() - start:.0f} s of CPU",
                flush=True,
            )
            return self.table.ended(last)

        measurements = Measurements(*image_sets(run.N, run.seed, self.lengths.held_out), self.lengths)
        train(run, measurements, self.lengths, self.table.last_step, self.folder / f"{run}-{settings}", put)
