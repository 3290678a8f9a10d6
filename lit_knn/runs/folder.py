"""The folder of a training run: its configurations, and the runs whose checkpoints it was resumed from."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.common.checkpoint_file import hint_of_runs
from lit_knn.common.errors import InputError
from lit_knn.runs.lock import LOCK_NAME
from lit_knn.runs.names import Options, option_of
from lit_knn.runs.record import RECORD_NAME, read_record

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.csv"
# A run writes these files before its first step.
WRITTEN_FIRST = (CONFIG_NAME, RECORD_NAME, LOCK_NAME, "hparams.yaml", "events.out.tfevents.*")


def run_of(checkpoint: str | Path) -> Path:
    """Return the folder of the run that has this checkpoint in one of its subfolders."""
    return Path(checkpoint).resolve().parent.parent


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run."""

    path: Path  # runs/NAME/VERSION
    # The folders that were made for this run: this one, and parents that were missing, from the inside out.
    made: tuple[Path, ...] = ()

    def config(self) -> Options:
        """Read the configuration; raise InputError if it is missing or not that of a training run."""
        path = self.path / CONFIG_NAME
        if not path.is_file():
            hint = hint_of_runs(self.path) or "; give the folder of a training run, as runs/x/knn_0"
            raise InputError(f"{path} does not exist{hint}")

        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error

        if not isinstance(config, dict) or not {"model", "data", "trainer"} <= config.keys():
            raise InputError(f"{path} is not the configuration of a training run")
        return config

    def earlier(self, name: str) -> list[Path]:
        """Return the paths of a file of the earlier parts of the run in this folder, from the first part on.

        A run that is resumed in its folder renames the file of the part before, such as `config.yaml`, to
        `config_0.yaml`, `config_1.yaml` and so on.

        Args:
            name: the name of the latest part's file.
        """
        stem, suffix = Path(name).stem, Path(name).suffix
        by_number = {}
        for path in self.path.glob("*"):
            match = re.fullmatch(rf"{re.escape(stem)}_(\d+){re.escape(suffix)}", path.name)
            if match:
                by_number[int(match[1])] = path
        return [by_number[number] for number in sorted(by_number)]

    def keep_earlier(self, name: str) -> Path | None:
        """Rename a file of the part before this one, such as `config.yaml` to `config_0.yaml`.

        The number is one above the largest in use.

        Returns:
            The new path, or None if the file does not exist.
        """
        path = self.path / name
        if not path.is_file():
            return None

        number = 0
        for earlier in self.earlier(name):
            number = int(earlier.stem.rpartition("_")[2]) + 1
        return path.rename(path.with_stem(f"{path.stem}_{number}"))

    def start(self) -> str | None:
        """Return the checkpoint that the run was first resumed from, in another folder; None if there is none.

        Only the record says so. The configurations also name checkpoints in the run's own folder, and if this folder
        is moved, they may name those of another run, which has its place now.
        """
        return read_record(self.path).resumed_from

    def before(self) -> Iterator[tuple[Path, "RunFolder"]]:
        """Yield each checkpoint in another folder that the run was resumed from, with the folder of its run.

        That run may itself have been resumed from another one, and so on; the latest comes first. A folder
        without a record is the last one, because it does not say what it was resumed from.
        """
        run = self
        visited = {self.path.resolve()}

        while (run.path / RECORD_NAME).is_file():
            try:
                start = run.start()
            except InputError as error:
                rank_zero_warn(f"{error}; what was before it is left out")
                return
            if start is None:
                return
            run = RunFolder(run_of(start))
            # Edited records may name each other's checkpoints.
            if run.path in visited:
                return
            visited.add(run.path)
            yield Path(start), run

    def parts(self) -> list[Path]:
        """Return the folders of all parts of the run that are still there, from the first part to this one."""
        folders = [self.path]
        for start, run in self.before():
            if (run.path / RECORD_NAME).is_file():
                folders.append(run.path)
            else:
                problem = f"{self.path} was resumed from {start}, whose run is not there"
                rank_zero_warn(f"{problem}: its part is left out")
        return folders[::-1]

    def holds(self, checkpoint: str | Path) -> bool:
        """Return whether a checkpoint lies in a subfolder of this folder, such as `checkpoints`."""
        return run_of(checkpoint) == self.path.resolve()

    def trained(self, model: Options, seed: int | None = None) -> bool:
        """Return whether the run trained this model with this estimator; see `option_changed`."""
        return not self.option_changed(model, seed)

    def option_changed(self, model: Options, seed: int | None = None) -> str:
        """Return the first option that makes the run another training than that of `model`.

        It is "" if there is none, or if the configuration of the run cannot be read.

        Args:
            model: the class and the options of the model.
            seed: a seed that must be the run's, too; None if any seed will do.
        """
        try:
            config = self.config()
            before = config["model"]
            if before["class_path"] != model["class_path"]:
                return "model"
            # Weights of a class-conditional network do not fit one without classes.
            for option in ("estimator", "class_conditional"):
                if option_of(before, option) != option_of(model, option):
                    return f"model.{option}"
        except (InputError, KeyError, TypeError):
            return ""

        if seed is not None and config.get("seed_everything", seed) != seed:
            return "seed_everything"
        return ""

    def remove_unused(self) -> None:
        """Remove the folders that were made for this run if it did not train a step.

        They stay if they hold other files than a run writes before its first step.
        """
        if not self.made or self._has_trained():
            return
        for path in self.path.rglob("*"):
            is_written_first = any(path.match(pattern) for pattern in WRITTEN_FIRST)
            if not path.is_dir() and not is_written_first:
                return

        shutil.rmtree(self.path, ignore_errors=True)
        # `rmdir` fails for a parent folder that holds something else, which then stays.
        with contextlib.suppress(OSError):
            for folder in self.made[1:]:
                folder.rmdir()

    def _has_trained(self) -> bool:
        """Return whether the record of the run counts a step; also True for a record that cannot be read."""
        try:
            return read_record(self.path).step > 0
        except InputError:
            return (self.path / RECORD_NAME).is_file()
