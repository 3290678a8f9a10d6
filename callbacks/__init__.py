"""Lightning callbacks of the application."""

from callbacks.checkpoints import CheckpointByImages, LastCheckpoint
from callbacks.fidelity import PixelFrechetDistance
from callbacks.hybrid_sampling import HybridSampling
from callbacks.memorisation import Memorisation
from callbacks.progress import StepProgressBar
from callbacks.run_summary import RunSummary
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter

__all__ = [
    "CheckpointByImages",
    "HybridSampling",
    "LastCheckpoint",
    "Memorisation",
    "PixelFrechetDistance",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "StepProgressBar",
]
