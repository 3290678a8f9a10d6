"""This process: its SLURM job, and whether it is the first one of a run."""

import os
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.plugins.environments import SLURMEnvironment


def job_folder() -> str | None:
    """Name the folder, in that of a run, that belongs to this SLURM job; None without SLURM.

    It tells the job its run when it is queued again, and holds the checkpoint of SLURM's signal.
    """
    if not SLURMEnvironment.detect():
        return None
    return f"slurm_{os.environ.get('SLURM_JOB_ID')}"


def is_of_job(checkpoint: str | Path) -> bool:
    """Tell whether Lightning wrote this checkpoint when SLURM's signal came to this job."""
    return Path(checkpoint).parent.name == job_folder()


def is_first_process() -> bool:
    """Tell whether this is the first process of a run, before there is a trainer."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return rank_zero_only.rank == 0 and node == "0"  # type: ignore[attr-defined]
