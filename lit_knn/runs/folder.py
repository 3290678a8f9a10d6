"""The folder of a training run: its configurations, and the runs that it went on from."""

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


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run."""

    path: Path  # runs/NAME/VERSION
    made: tuple[Path, ...] = ()  # the folders that were made for this run, the inmost first

    def config(self, name: str = CONFIG_NAME) -> Options:
        """Read a configuration; raise InputError if it is missing or not that of a training run."""
        path = self.path / name
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
        """List the files of earlier parts of the run that went on in this folder, the first first.

        `name` is that of the latest part's file, such as `config.yaml`; theirs is `STEM_N.SUFFIX`.
        """
        stem, suffix = Path(name).stem, Path(name).suffix
        by_number = {}
        for path in self.path.glob("*"):
            match = re.fullmatch(rf"{re.escape(stem)}_(\d+){re.escape(suffix)}", path.name)
            if match:
                by_number[int(match[1])] = path
        return [by_number[number] for number in sorted(by_number)]

    def keep_earlier(self, name: str) -> Path | None:
        """Rename a file of the part before this one to `STEM_N.SUFFIX`; return the new path.

        N is above the numbers in use. The result is None if the file does not exist.
        """
        path = self.path / name
        if not path.is_file():
            return None

        number = 0
        for earlier in self.earlier(name):
            number = int(earlier.stem.rpartition("_")[2]) + 1
        return path.rename(path.with_stem(f"{path.stem}_{number}"))

    def start(self) -> str | None:
        """Return the checkpoint in another folder that the run was resumed from, or None."""
        configs = [*self.earlier(CONFIG_NAME), self.path / CONFIG_NAME]
        for path in reversed(configs):
            start: str | None = self.config(path.name).get("ckpt_path")
            if start is None or not self.holds(start):
                return start
        return None

    def before(self) -> Iterator[tuple[Path, "RunFolder"]]:
        """Yield the checkpoints in other folders that the run was resumed from, and those folders.

        The latest comes first. A folder without a configuration is the last one.
        """
        run = self
        visited = {self.path.resolve()}

        while (run.path / CONFIG_NAME).is_file():
            start = run.start()
            if start is None:
                return
            run = RunFolder(Path(start).parent.parent)
            if run.path.resolve() in visited:
                return
            visited.add(run.path.resolve())
            yield Path(start), run

    def parts(self) -> list[Path]:
        """List the folders of the run, from the first part that still has one to this one."""
        folders = [self.path]
        for start, run in self.before():
            if (run.path / RECORD_NAME).is_file():
                folders.append(run.path)
            else:
                problem = f"{self.path} was resumed from {start}, whose run is not there"
                rank_zero_warn(f"{problem}: its part is left out")
        return folders[::-1]

    def holds(self, checkpoint: str | Path) -> bool:
        """Tell whether a checkpoint is one of this run's own, in `checkpoints`."""
        return Path(checkpoint).parent.parent.resolve() == self.path.resolve()

    def trained(self, model: Options, seed: int | None = None) -> bool:
        """Tell whether the run trained this model with this estimator, as far as one can read.

        If a seed is given, it must be the run's, too.
        """
        try:
            config = self.config()
            before = config["model"]
            same = before["class_path"] == model["class_path"]
            # A net with classes cannot take the weights of one without.
            for option in ("estimator", "class_conditional"):
                same = same and option_of(before, option) == option_of(model, option)
        except (InputError, KeyError, TypeError):
            return True

        if seed is None:
            return same
        return same and config.get("seed_everything", seed) == seed

    def remove_unused(self) -> None:
        """Remove the folders that were made for a run that did not begin.

        They stay if they hold more than the settings of the run.
        """
        if not self.made or self._has_trained():
            return
        for path in self.path.rglob("*"):
            is_settings = any(path.match(pattern) for pattern in WRITTEN_FIRST)
            if not path.is_dir() and not is_settings:
                return

        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # A folder with other files stays.
            for folder in self.made[1:]:
                folder.rmdir()

    def _has_trained(self) -> bool:
        """Tell whether the record of the run has a step; one that cannot be read may have some."""
        try:
            return read_record(self.path).step > 0
        except InputError:
            return (self.path / RECORD_NAME).is_file()
