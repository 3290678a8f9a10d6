"""Finds the checkpoint that a run starts from: the newest one of the run's name, or that of the SLURM job."""

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
from lit_knn.runs.folder import RunFolder, run_of
from lit_knn.runs.harmless import harmful
from lit_knn.runs.names import Options, folder_of_name, given_version, job_folder
from lit_knn.runs.record import read_record

# A checkpoint can only be resumed from with the same values of these options.
FIXED = ("seed_everything", "data", "trainer.accumulate_grad_batches", "trainer.devices")


class Start(NamedTuple):
    """A checkpoint to start from."""

    path: Path
    content: Content


def newest_checkpoint(options: Options, to_resume: bool) -> Start:
    """Return the newest undamaged `last.ckpt` among the runs with the name, model, estimator and data of this run.

    The name alone is not enough, because runs that compare estimators or seeds may share one. A damaged
    checkpoint is left out with a warning.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
        to_resume: a training is resumed, so the seed and the choice of images must agree, too.
    """
    parent = folder_of_name(options["trainer"])
    seed = options["seed_everything"] if to_resume else None
    newest_other = ""  # why the newest of the unsuitable runs is one; empty if there is none

    for path in _newest_first(parent.glob(f"*/{CHECKPOINTS}/{LAST_NAME}")):
        problem = _difference(RunFolder(path.parent.parent), options, to_resume, seed)
        if problem is not None:
            newest_other = newest_other or f"; {problem}"
            continue

        start = _first_whole([path], to_resume)
        if start is not None:
            # Somebody who forgot an option of the newest run should see that an older one is resumed.
            rank_zero_info(f"--ckpt_path last: {path}{newest_other}")
            return start

    same = "name, model, estimator and data"
    if seed is not None:
        same = f"name, model, estimator, data and --seed_everything {seed}"
    needed = f"it needs a whole one of a run with this {same}"
    raise InputError(f"--ckpt_path last: found none in {parent}; {needed}{newest_other}")


def _difference(run: RunFolder, options: Options, trains: bool, seed: int | None) -> str | None:
    """Return what makes a run unsuitable, in words; None if nothing does or its configuration cannot be read.

    `trains` says that this run is a training. A `seed` must be that of both runs; with None any will do.
    """
    option = run.option_changed(options["model"], seed)
    if option:
        return f"{run.path} has another --{option}"
    try:
        different = data_changes(run.config(), options, trains)
    except InputError:
        return None
    return f"{run.path} has other data: {described(different)}" if different else None


def warn_of_changes(checkpoint: str, options: Options) -> None:
    """Warn of options that change what is trained, and differ from those of the run that a training resumes.

    Args:
        checkpoint: the path of the checkpoint.
        options: the configuration of this run, as its config.yaml will have it.
    """
    try:
        before = RunFolder(run_of(checkpoint)).config()
    except InputError:  # A run of other code has no config.yaml.
        return
    different = changes(before, options)
    changed = {name: different[name] for name in harmful(different, options["model"])}
    if changed:
        rank_zero_warn(
            f"--ckpt_path {checkpoint} was trained with other options: {described(changed)}"
        )


class Part(NamedTuple):
    """A run that an earlier start of this SLURM job began, and that this process may continue."""

    run: RunFolder
    # The run has the command line, the model, the estimator and the seed of this process.
    repeats: bool
    # The options that have other values in this process, and the names of those that change what is trained.
    different: Changes
    harmful: list[str]


def checkpoint_of_job(options: Options) -> Start | None:
    """Return the checkpoint from which a job that SLURM has queued again continues, or None for a new run.

    A job may run several commands. So an earlier part is continued only if it has the command line of this
    process, or options that differ only in harmless ones, see `lit_knn.runs.harmless`. A warning names
    options that have changed. If no part can be continued, a warning names the one that is nearest.

    Args:
        options: the configuration of this run, as its config.yaml will have it.
    """
    others: list[tuple[Part, Start]] = []
    for part in _parts_of_job(options):
        start = newest_of_job(part.run)
        if start is None:
            continue
        if part.repeats or not part.harmful:
            _warn_of_part_changed(part)
            return start
        others.append((part, start))

    if others:
        nearest, start = min(others, key=lambda other: len(other[0].harmful))
        _warn_of_part_left(nearest, start.path)
    return None


def _parts_of_job(options: Options) -> list[Part]:
    """Return the earlier parts of this job that have this run's name and that this process may continue.

    Those with the same command line come first. Among equals, newer ones come first.
    """
    job = job_folder()
    if job is None:
        return []

    version = given_version(options["trainer"]) or "*"
    parts = []
    job_folders = folder_of_name(options["trainer"]).glob(f"{version}/{job}")
    for folder in _newest_first(job_folders):
        run = RunFolder(folder.parent)
        try:
            before = run.config()
            record = read_record(run.path)
        except InputError:  # The run ended before its first step, when both files are there.
            continue

        same = run.trained(options["model"], options["seed_everything"])
        repeats = same and record.command == shlex.join(sys.argv)
        # Of another command, a finished run is not continued, nor any run if --ckpt_path says where to start.
        if not repeats and (record.status == "finished" or options["ckpt_path"] is not None):
            continue
        # A finished run of the same command is continued only in a job that was queued again. Otherwise the job runs
        # the same command twice on purpose.
        if record.status == "finished" and not _queued_again(folder):
            continue

        different = changes(before, options)
        different.pop("ckpt_path", None)
        parts.append(Part(run, repeats, different, harmful(different, options["model"])))
    return sorted(parts, key=lambda part: not part.repeats)


def _queued_again(job_folder: Path) -> bool:
    """Return whether SLURM has queued this job again: SLURM counts it, or Lightning has saved into the job's folder."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0" or any(job_folder.iterdir())


def newest_of_job(run: RunFolder) -> Start | None:
    """Return the newest undamaged checkpoint of a run, `last.ckpt` or that of SLURM's signal; None if there is none."""
    paths = [run.path / CHECKPOINTS / LAST_NAME, *run.path.glob(f"{job_folder()}/hpc_ckpt_*.ckpt")]
    return _first_whole(_newest_first(paths), to_resume=True)


def _warn_of_part_changed(part: Part) -> None:
    """Warn of options that have changed since an earlier part that is continued."""
    if part.different:
        changed = described(part.different)
        rank_zero_warn(f"this job goes on in {part.run.path} with changed options: {changed}")


def _warn_of_part_left(part: Part, checkpoint: Path) -> None:
    """Warn that an earlier part is not continued because of changed options, and say how to resume its checkpoint."""
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
    """Return the first of the checkpoints that is not damaged, or None; warn of damaged ones before it."""
    for path in paths:
        try:
            return Start(path, read_training(path, to_resume))
        except InputError as error:
            rank_zero_warn(f"{error}; it is left out")
    return None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that exist, sorted by the time of their last change, the newest first."""
    existing = [path for path in paths if path.exists()]
    return sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True)
