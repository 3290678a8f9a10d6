"""Lightning callbacks of the application."""

from callbacks.checkpoints import CheckpointByImages, LastCheckpoint
from callbacks.fidelity import Fidelity, PixelFrechetDistance
from callbacks.progress import StepProgressBar
from callbacks.run_summary import RunSummary
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter

__all__ = [
    "CheckpointByImages",
    "Fidelity",
    "LastCheckpoint",
    "PixelFrechetDistance",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "StepProgressBar",
]
