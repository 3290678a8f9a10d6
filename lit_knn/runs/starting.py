"""Finds the checkpoint that a run starts from: the newest of its name, or that of its SLURM job."""

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lit_knn.common.checkpoint_file import CHECKPOINTS, LAST_NAME, Content
from lit_knn.common.errors import InputError
from lit_knn.runs.changes import Changes, changes, data_changes, described
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.harmless import harmful
from lit_knn.runs.names import Options, folder_of_name, given_version, job_folder
from lit_knn.runs.record import read_record

# With other values of these, a checkpoint is refused.
FIXED = ("seed_everything", "data", "trainer.accumulate_grad_batches", "trainer.devices")


class Start(NamedTuple):
    """A checkpoint to start from."""

    path: Path
    content: Content


def newest_checkpoint(options: Options, to_resume: bool) -> Start:
    """Return the newest whole `last.ckpt` of a run's name, model, estimator and data.

    Runs that compare estimators or seeds may share a name. Damaged checkpoints are left out with
    a warning.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
        to_resume: a training goes on, so the seed and the choice of images must agree, too.
    """
    parent = folder_of_name(options["trainer"])
    seed = options["seed_everything"] if to_resume else None
    newest_other = ""  # the newest run that does not count

    for path in _newest_first(parent.glob(f"*/{CHECKPOINTS}/{LAST_NAME}")):
        problem = _problem(RunFolder(path.parent.parent), options, to_resume, seed)
        if problem is not None:
            newest_other = newest_other or f"; {problem}"
            continue

        start = _first_whole([path], to_resume)
        if start is not None:
            # Somebody who forgot an option of the newest run would go on with an older one.
            rank_zero_info(f"--ckpt_path last: {path}{newest_other}")
            return start

    same = "name, model, estimator and data"
    if seed is not None:
        same = f"name, model, estimator, data and --seed_everything {seed}"
    needed = f"it needs a whole one of a run with this {same}"
    raise InputError(f"--ckpt_path last: found none in {parent}; {needed}{newest_other}")


def _problem(run: RunFolder, options: Options, trains: bool, seed: int | None) -> str | None:
    """Say what of a run differs from this one, as far as one can read; None if nothing does."""
    if not run.trained(options["model"], seed):
        return f"{run.path} has another model, estimator or seed"
    try:
        different = data_changes(run.config(), options, trains)
    except InputError:
        return None
    return f"{run.path} has other data: {described(different)}" if different else None


class Part(NamedTuple):
    """A run of this job that can go on."""

    run: RunFolder
    repeats: bool  # it has the command line of this process, its model, its estimator and its seed
    different: Changes  # options that have other values in this process
    harmful: list[str]  # names of those that change what is trained


def checkpoint_of_job(options: Options) -> Start | None:
    """Return the checkpoint from which a job that is queued again goes on, or None.

    A job may run several commands. So the earlier part has the same command line, or the same
    options but for harmless ones, see `lit_knn.runs.harmless`. Changed options are named, and so is
    a part with options that this run cannot go on with.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
    """
    others: list[tuple[Part, Start]] = []
    for part in _parts_of_job(options):
        start = newest_of_job(part.run)
        if start is None:
            continue
        if part.repeats or not part.harmful:
            _tell_of_changes(part)
            return start
        others.append((part, start))

    if others:
        nearest, start = min(others, key=lambda other: len(other[0].harmful))
        _tell_of_other(nearest, start.path)
    return None


def _parts_of_job(options: Options) -> list[Part]:
    """Return the runs of this job that have this run's name and can go on.

    Repeated ones come first, then the newest ones.
    """
    job = job_folder()
    if job is None:
        return []

    version = given_version(options["trainer"]) or "*"
    parts = []
    for mark in _newest_first(folder_of_name(options["trainer"]).glob(f"{version}/{job}")):
        run = RunFolder(mark.parent)
        try:
            before, record = run.config(), read_record(run.path)
        except InputError:  # It ended before its first step.
            continue

        same = run.trained(options["model"], options["seed_everything"])
        repeats = same and record.command == shlex.join(sys.argv)
        # Another command that has a checkpoint says itself where it starts.
        if not repeats and (record.status == "finished" or options["ckpt_path"] is not None):
            continue
        # A job that is not queued again may run the same command twice.
        if record.status == "finished" and not _queued_again(mark):
            continue

        different = changes(before, options)
        different.pop("ckpt_path", None)
        parts.append(Part(run, repeats, different, harmful(different, options["model"])))
    return sorted(parts, key=lambda part: not part.repeats)


def _queued_again(mark: Path) -> bool:
    """Tell whether SLURM has queued this job again.

    Args:
        mark: the job's folder in that of its run.
    """
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0" or any(mark.iterdir())


def newest_of_job(run: RunFolder) -> Start | None:
    """Return the newest undamaged checkpoint of a run: that of SLURM's signal, or the last one."""
    paths = [run.path / CHECKPOINTS / LAST_NAME, *run.path.glob(f"{job_folder()}/hpc_ckpt_*.ckpt")]
    return _first_whole(_newest_first(paths), to_resume=True)


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


def _first_whole(paths: Iterable[Path], to_resume: bool) -> Start | None:
    """Read the first checkpoint that is not damaged, or return None."""
    for path in paths:
        try:
            return Start(path, read_training(path, to_resume))
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
    return None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort the paths that exist, of files or folders, by the time of their last change."""
    existing = [path for path in paths if path.exists()]
    return sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True)
