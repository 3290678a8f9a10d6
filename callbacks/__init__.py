"""Lightning callbacks: they connect the rest of lit_knn with a run. Configs name them as `lit_knn.callbacks.X`."""

from lit_knn.callbacks.checkpoints import CheckpointByImages
from lit_knn.callbacks.estimator_error import EstimatorError
from lit_knn.callbacks.fidelity import Fidelity, PixelFrechetDistance
from lit_knn.callbacks.free_particles import FreeParticles
from lit_knn.callbacks.hybrid_sampling import HybridSampling
from lit_knn.callbacks.last_checkpoint import LastCheckpoint
from lit_knn.callbacks.mean_picture import MeanPicture
from lit_knn.callbacks.memorisation import Memorisation
from lit_knn.callbacks.network_speed import NetworkSpeed
from lit_knn.callbacks.posterior_picture import PosteriorPicture
from lit_knn.callbacks.power_averages import PowerAverages
from lit_knn.callbacks.progress import StepProgressBar
from lit_knn.callbacks.run_record import RunRecord
from lit_knn.callbacks.run_summary import RunSummary
from lit_knn.callbacks.sample_grid import SampleGrid
from lit_knn.callbacks.sample_writer import SampleWriter

__all__ = [
    "CheckpointByImages",
    "EstimatorError",
    "Fidelity",
    "FreeParticles",
    "HybridSampling",
    "LastCheckpoint",
    "MeanPicture",
    "Memorisation",
    "NetworkSpeed",
    "PixelFrechetDistance",
    "PosteriorPicture",
    "PowerAverages",
    "RunRecord",
    "RunSummary",
    "SampleGrid",
    "SampleWriter",
    "StepProgressBar",
]

# From the root of a checkout, `import callbacks` finds this folder, too. It then gets the package of the other name.
if __name__ == "callbacks":
    import sys

    sys.modules[__name__] = sys.modules["lit_knn.callbacks"]
