"""Lightning callbacks of the application."""

from callbacks.checkpoint_by_images import CheckpointByImages
from callbacks.estimator_error import EstimatorError
from callbacks.fidelity import Fidelity
from callbacks.hybrid_sampling import HybridSampling
from callbacks.last_checkpoint import LastCheckpoint
from callbacks.mean_picture import MeanPicture
from callbacks.memorisation import Memorisation
from callbacks.network_agreement import NetworkAgreement
from callbacks.network_speed import NetworkSpeed
from callbacks.pixel_frechet_distance import PixelFrechetDistance
from callbacks.posterior_picture import PosteriorPicture
from callbacks.power_averages import PowerAverages
from callbacks.progress import StepProgressBar
from callbacks.run_record import RunRecord
from callbacks.run_summary import RunSummary
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter
from callbacks.size_calibration import SizeCalibration

__all__ = [
    "CheckpointByImages",
    "EstimatorError",
    "Fidelity",
    "HybridSampling",
    "LastCheckpoint",
    "MeanPicture",
    "Memorisation",
    "NetworkAgreement",
    "NetworkSpeed",
    "PixelFrechetDistance",
    "PosteriorPicture",
    "PowerAverages",
    "RunRecord",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "SizeCalibration",
    "StepProgressBar",
]
