"""Finds the checkpoint from which a SLURM job goes on that is queued again."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME
from lit_knn.common.errors import InputError
from lit_knn.runs.changes import Changes, changes, described
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.harmless import harmful
from lit_knn.runs.job import job_folder
from lit_knn.runs.names import folder_of_name, given_version
from lit_knn.runs.record import read_record
from lit_knn.runs.starts import Start, newest_first

# With other values of these, a checkpoint is refused.
FIXED = ("seed_everything", "data", "trainer.accumulate_grad_batches", "trainer.devices")


class Part(NamedTuple):
    """A run of this job."""

    run: RunFolder
    repeats: bool  # it has the command line of this process, its model, its estimator and its seed
    finished: bool
    different: Changes  # options that have other values in this process
    harmful: list[str]  # names of those that change what is trained


def checkpoint_of_job(options: Mapping[str, Any]) -> Start | None:
    """Return the checkpoint from which a job that is queued again goes on, or None.

    A job may run several commands. So the earlier part has the same command line, or is not
    finished and has the same options but for harmless ones, see `lit_knn.runs.changes`. Changed
    options are named, and so is a part with options that this run cannot go on with.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
    """
    parts = _parts_of_job(options)
    for part in parts:
        if part.repeats and (not part.finished or _queued_again(part.run)):
            start = newest_of_job(part.run)
            if start is not None:
                _tell_of_changes(part)
                return start

    if options["ckpt_path"] is not None:  # Another command, which says itself where it starts.
        return None

    others = []
    for part in parts:
        if part.repeats or part.finished:
            continue
        start = newest_of_job(part.run)
        if start is None:
            continue

        if not part.harmful:
            _tell_of_changes(part)
            return start
        others.append((part, start[0]))

    if others:
        nearest, checkpoint = min(others, key=lambda other: len(other[0].harmful))
        _tell_of_other(nearest, checkpoint)
    return None


def _parts_of_job(options: Mapping[str, Any]) -> list[Part]:
    """Return the runs of this job that have this run's name, the newest first."""
    job = job_folder()
    version = given_version(options["trainer"])
    if job is None:
        return []

    parts = []
    for mark in newest_first(folder_of_name(options["trainer"]).glob(f"{version or '*'}/{job}")):
        run = RunFolder(mark.parent)
        try:
            before, record = run.config(), read_record(run.path)
        except InputError:  # It ended before its first step.
            continue

        different = changes(before, options)
        different.pop("ckpt_path", None)
        same = run.trained(options["model"], options["seed_everything"])
        repeats = same and record.command == shlex.join(sys.argv)
        finished = record.status == "finished"
        parts.append(Part(run, repeats, finished, different, harmful(different, options["model"])))
    return parts


def _queued_again(run: RunFolder) -> bool:
    """Tell whether SLURM has queued this job again; if not, the same command makes another run."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0":
        return True
    return any((run.path / str(job_folder())).iterdir())


def newest_of_job(run: RunFolder) -> Start | None:
    """Return the newest undamaged checkpoint of a run: that of SLURM's signal, or the last one."""
    paths = list(run.path.glob(f"{job_folder()}/hpc_ckpt_*.ckpt"))
    paths.append(run.path / CHECKPOINTS / LAST_NAME)
    existing = [path for path in paths if path.is_file()]

    for path in newest_first(existing):
        try:
            return path, read_training(path, to_resume=True)
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
    return None


def _tell_of_changes(part: Part) -> None:
    if part.different:
        changed = described(part.different)
        rank_zero_warn(f"this job goes on in {part.run.path} with changed options: {changed}")


def _tell_of_other(part: Part, checkpoint: Path) -> None:
    """Warn that an earlier part is left alone, and say how to go on with it.

    Args:
        part: the earlier part, with harmful changes.
        checkpoint: its newest one.
    """
    different = {name: part.different[name] for name in part.harmful}
    problem = f"an earlier part in {part.run.path} with other options: {described(different)}"

    resuming = ""
    for name, (old, _) in different.items():
        if name.startswith(FIXED):
            resuming += f"--{name} {old} "
    resuming += f"--ckpt_path {checkpoint}"

    advice = f"this run starts anew, and {resuming} would go on from there"
    rank_zero_warn(f"this job has {problem}; {advice}")
