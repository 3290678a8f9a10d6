"""Lightning callbacks of the application."""

from callbacks.checkpoints import CheckpointByImages, LastCheckpoint
from callbacks.fidelity import PixelFrechetDistance
from callbacks.network_speed import NetworkSpeed
from callbacks.progress import StepProgressBar
from callbacks.run_summary import RunSummary
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter

__all__ = [
    "CheckpointByImages",
    "LastCheckpoint",
    "NetworkSpeed",
    "PixelFrechetDistance",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "StepProgressBar",
]
