"""Decides which process may write into the folder of a run."""

import fcntl
import os
from io import TextIOWrapper
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_only

from lit_knn.common.errors import InputError

LOCK_NAME = ".lock"
# The open files that hold the locks of this process. The system frees the locks when the process ends.
_locks: list[TextIOWrapper] = []


def is_first_process() -> bool:
    """Return whether this is the first process of a run, from the environment, because there is no trainer yet."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return rank_zero_only.rank == 0 and node == "0"  # type: ignore[attr-defined]


def lock_folder(folder: Path) -> None:
    """Lock a folder until this process ends; raise InputError if another process has locked it."""
    file = (folder / LOCK_NAME).open("a")
    try:
        # With flock, processes that a data loader forks would keep the lock after this process has ended.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        problem = f"{folder}: another process trains in this folder"
        advice = "wait until it ends, or give another --trainer.logger.version"
        raise InputError(f"{problem}; {advice}") from error
    except OSError:
        pass  # This file system knows no locks.
    _locks.append(file)
