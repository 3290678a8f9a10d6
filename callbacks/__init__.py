"""Lightning callbacks of the application."""

from callbacks.checkpoints import CheckpointByImages, LastCheckpoint
from callbacks.estimator_error import EstimatorError
from callbacks.fidelity import PixelFrechetDistance
from callbacks.progress import StepProgressBar
from callbacks.run_summary import RunSummary
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter

__all__ = [
    "CheckpointByImages",
    "EstimatorError",
    "LastCheckpoint",
    "PixelFrechetDistance",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "StepProgressBar",
]
