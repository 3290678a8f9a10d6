"""The loss and the error of EDM's runs by noise level, from the checkpoints of `benchmarks.learning_curves`.

    python -m benchmarks.learning_curves.levels --set cifar16_1000 --kept x.npz --checkpoints FOLDER --output x.csv
    python -m benchmarks.learning_curves.differences x.csv --output levels

Each range of levels has rows of its own, whose set is named after the range, so that `differences` compares within it.
Rows that the file has are not measured again. The loss at new images and the error against the exact target have the
weight of EDM's loss.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.learning_curves.grid import Run
from benchmarks.learning_curves.kind import Latents
from benchmarks.learning_curves.kinds import LATENT_KINDS
from benchmarks.learning_curves.sets import CIFAR, ImageSet, cifar
from benchmarks.learning_curves.table import COLUMNS, CurveTable
from lit_knn.common.checkpoint_file import LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.common.progress import progress_bar
from lit_knn.common.tables import Row
from lit_knn.estimators import Exact, OneSample

# Half of a training's latents are below t = 0.3. On 1,000 images targets have noise above about 1.
EDGES = (0.0, 0.1, 0.3, 1.0, 3.0, math.inf)
LATENTS, CHUNK = 8_192, 1_024
# The last parts of the keys of the latents: of new images, and of training images.
NEW, TRAINING = 4, 5


def main(arguments: list[str] | None = None) -> None:
    """Measure the checkpoints that the table lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets = [name for name in CIFAR if not CIFAR[name].get("by_class")]
    parser.add_argument("--set", choices=sets, required=True)
    parser.add_argument("--kept", type=Path, required=True, help="the images, see learning_curves")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--estimators", nargs="+", help="estimators; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds; by default all")
    parser.add_argument("--output", type=Path, required=True, help="the rows, a .csv file")
    args = parser.parse_args(arguments)

    torch.set_num_threads(1)
    with errors_in_one_line():
        found = checkpoints(args.checkpoints, args.set, args.estimators, args.seeds)
        if not found:
            raise InputError(f"--checkpoints {args.checkpoints}: no such run of EDM on {args.set}")
        table = CurveTable(args.output)
        image_set = cifar(args.set, None, args.kept)
        levels = Levels(image_set)
        known = table.load()
        with progress_bar(len(found), "Levels", " checkpoints", leave=True) as bar:
            for run, path in found:
                bar.update()
                saved = torch.load(path, weights_only=True, mmap=True)
                step = saved["global_step"]
                keys = [run_of_range(run, *ends)._asdict() for ends in pairwise(EDGES)]
                if all(table.find(known, **key, step=step) for key in keys):
                    continue
                settings = path.parent.name.rpartition("-")[2]
                for row in levels.rows(run, step, saved["state_dict"]):
                    table.append({**row, "settings": settings})


def checkpoints(
    folder: Path, of: str, estimators: Sequence[str] | None, seeds: Sequence[int] | None
) -> list[tuple[Run, Path]]:
    """List the checkpoints of EDM's runs on a set: those of all measurements, or the last one of an earlier run."""
    found = []
    for each in sorted(folder.glob(f"{of}-EDM-*")):
        name, seed, _ = each.name.rsplit("-", 2)
        run = Run(of, "EDM", name.removeprefix(f"{of}-EDM-"), int(seed))
        if (estimators is None or run.estimator in estimators) and (
            seeds is None or run.seed in seeds
        ):
            paths = sorted(each.glob("step=*.ckpt")) or sorted(each.glob(LAST_NAME))
            found += [(run, path) for path in paths]
    return found


def run_of_range(run: Run, low: float, high: float) -> Run:
    """Return what a run is called in a range of levels: as one of a set that has the range in its name."""
    return run._replace(set=f"{run.set} at t {low:g} to {high:g}")


class Levels:
    """Measures networks at fixed latents of new images and of training images, by ranges of levels.

    Args:
        image_set: the set of the runs.
    """

    def __init__(self, image_set: ImageSet) -> None:
        self.kind = LATENT_KINDS["EDM"]
        self.batch_size = image_set.lengths.batch_size
        images = image_set.images()
        assert images.held_out is not None
        self.new = self.kind.latents(images.held_out, LATENTS, NEW)
        self.held = self.kind.latents(images.training, LATENTS, TRAINING)
        exact = Exact().bind(images.training)
        self.wanted = self.kind.exact_output(self.held, exact)
        plug_ins = {"estimator": OneSample()}
        self.module = self.kind.make(
            image_set.net(), plug_ins, 0, image_set.lengths.steps, None
        ).eval()

    @torch.no_grad()
    def rows(self, run: Run, step: int, weights: dict[str, Tensor]) -> Iterator[Row]:
        """Yield the row of each range for the weights that a run has after a step."""
        self.module.load_state_dict(weights)
        losses = self._errors(self.new, self.new.x)
        errors = self._errors(self.held, self.wanted)
        for low, high in pairwise(EDGES):
            row: Row = {
                column: math.nan if kind is float else "" for column, kind in COLUMNS.items()
            }
            row |= run_of_range(run, low, high)._asdict()
            row |= {"step": step, "images": step * self.batch_size, "images_before": 0}
            row["held_out_loss"] = _mean_between(losses, self.new.t, low, high)
            row["val_error"] = _mean_between(errors, self.held.t, low, high)
            yield row

    def _errors(self, latents: Latents, wanted: Tensor) -> Tensor:
        """Compare the network with targets (B, *shape) in chunks: (B,)."""
        parts = []
        for start in range(0, len(wanted), CHUNK):
            rows = slice(start, start + CHUNK)
            x, z, t, lower = (part[rows] for part in latents[:4])
            parts.append(self.kind.errors(self.module, Latents(x, z, t, lower, None), wanted[rows]))
        return torch.cat(parts)


def _mean_between(values: Tensor, t: Tensor, low: float, high: float) -> float:
    """Return the mean of the values (B,) whose level t (B,) is in [low, high)."""
    return values[(t >= low) & (t < high)].mean().item()


if __name__ == "__main__":
    main()
