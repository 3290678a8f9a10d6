"""Runs a module in one process for each rank."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_ranks(module, folder, how, ranks):
    """Run `python -m MODULE RANK RANKS FOLDER HOW` for all ranks at once; return exit status and errors of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(ranks), str(folder), how],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors
