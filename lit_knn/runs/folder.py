"""The folder of a training run: who may write into it, what is in it, and what it went on from."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, hint_of_runs, kept_in
from lit_knn.common.errors import InputError
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.record import RECORD_NAME, read_record

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.csv"
LOCK_NAME = ".lock"
SNAPSHOTS_FOLDER = "snapshots"
# A run writes these files before its first step.
WRITTEN_FIRST = (CONFIG_NAME, RECORD_NAME, LOCK_NAME, "hparams.yaml", "events.out.tfevents.*")
# `lit-knn average` gives its files these names.
AVERAGE_NAME = re.compile(r"ema=(0\.\d+)\.ckpt")

# The locks of this process; the system frees them when it ends.
_locks: list[Any] = []


@dataclass(frozen=True)
class RunFolder:
    """The folder of a training run."""

    path: Path  # runs/NAME/VERSION
    made: tuple[Path, ...] = ()  # the folders that were made for this run, the inmost first

    def config(self, name: str = CONFIG_NAME) -> dict[str, Any]:
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
        stem, suffix = os.path.splitext(name)
        pattern = re.compile(rf"{re.escape(stem)}_(\d+){re.escape(suffix)}")

        by_number = {}
        for path in self.path.glob("*"):
            match = pattern.fullmatch(path.name)
            if match:
                by_number[int(match[1])] = path
        return [by_number[number] for number in sorted(by_number)]

    def start(self) -> str | None:
        """Return the checkpoint in another folder that the run was resumed from, or None."""
        names = [path.name for path in self.earlier(CONFIG_NAME)]
        names.append(CONFIG_NAME)

        for name in reversed(names):
            start = self.config(name).get("ckpt_path")
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

    def trained(self, model: Mapping[str, Any], seed: int | None = None) -> bool:
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

    def kept_checkpoints(
        self, folder: str | Path | None = None, max_steps: int = -1
    ) -> dict[int, Path]:
        """Return the paths of the checkpoints that `CheckpointByImages` kept, by the images seen.

        `last.ckpt` counts if the training is complete and no other checkpoint has as many images.

        Args:
            folder: the folder of the checkpoints. By default it is the run's, and checkpoints of
                earlier folders count up to the one that the run was resumed from.
            max_steps: the steps of a complete training.
        """
        if folder is None:
            place = self.path / CHECKPOINTS
            checkpoints = self._kept(CHECKPOINTS)
        else:
            place = Path(folder)
            checkpoints = kept_in(place)

        if not checkpoints:
            advice = "lit_knn.callbacks.CheckpointByImages keeps some"
            raise InputError(f"{place} has no images_seen=N.ckpt; {advice}")

        last = place / LAST_NAME
        if max_steps > 0 and last.is_file():
            try:
                end = read_training(last)
                if end["global_step"] >= max_steps:
                    checkpoints.setdefault(int(end["images_seen"]), last)
            except InputError as error:
                rank_zero_warn(f"{error}; it is left out")
        return dict(sorted(checkpoints.items()))

    def kept_snapshots(self) -> dict[int, Path]:
        """Return the snapshots of averages of the run and its earlier folders, by images seen."""
        self.config()  # Refuse a folder that is none of a run, before it gets averages.
        snapshots = self._kept(SNAPSHOTS_FOLDER)
        if not snapshots:
            folder = self.path / SNAPSHOTS_FOLDER
            advice = "add lit_knn.callbacks.PowerAverages to the training"
            raise InputError(f"{folder} has no snapshots of averages: {advice}")
        return snapshots

    def _kept(self, name: str) -> dict[int, Path]:
        """Return what the run and its earlier folders have in their folders NAME, by images seen.

        Files of an earlier folder count up to the checkpoint from which the run went on.
        """
        files = kept_in(self.path / name)
        for start, run in self.before():
            try:
                until = read_training(start).get("images_seen", 0)
            except InputError as error:
                problem = f"the run was resumed from {error}"
                rank_zero_warn(f"{problem}; what was kept before it is missing")
                break

            # The earlier run may have gone on since.
            until = min(until, min(files, default=until))
            for seen, path in kept_in(run.path / name).items():
                if seen <= until:
                    files.setdefault(seen, path)
        return dict(sorted(files.items()))

    def lock(self) -> None:
        """Keep other processes from training in this folder as long as this process lives."""
        file = (self.path / LOCK_NAME).open("a")
        try:
            # Unlike flock, this lock is not shared with processes that a loader of data forks.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            problem = f"{self.path}: another process trains in this folder"
            advice = "wait until it ends, or give another --trainer.logger.version"
            raise InputError(f"{problem}; {advice}") from error
        except OSError:
            pass  # This file system knows no locks.
        _locks.append(file)

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
        """Tell whether the record of the run has a step, as far as one can read."""
        if not (self.path / RECORD_NAME).is_file():
            return False
        try:
            return read_record(self.path).step > 0
        except InputError:
            return True


def averages_in(folder: str | Path) -> dict[float, Path]:
    """Return the paths of the averages that `lit-knn average` made in a folder.

    They are sorted by relative length, which is their key.
    """
    averages = {}
    for path in Path(folder).glob("*.ckpt"):
        match = AVERAGE_NAME.fullmatch(path.name)
        if match:
            averages[float(match[1])] = path
    return dict(sorted(averages.items()))


def option_of(model: Mapping[str, Any], name: str) -> Any:
    """Return an option of a model, or None if the model has no such option."""
    return (model.get("init_args") or {}).get(name)
