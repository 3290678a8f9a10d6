"""Draw rows of results as matplotlib figures, including the figures of the paper."""

from lit_knn.figures.figure1 import figure1
from lit_knn.figures.figure2 import figure2
from lit_knn.figures.figure3 import figure3
from lit_knn.figures.figure5 import figure5
from lit_knn.figures.image_grid import captioned, image_grid, pair_grid
from lit_knn.figures.network_agreement import agreement_curves, agreement_grid, same_noise_boxes
from lit_knn.figures.probe import probe_figure
from lit_knn.figures.size_calibration import size_calibration
from lit_knn.figures.style import save_figure
from lit_knn.figures.training_curves import TrainingCurve, average_curve, checkpoint_curve, figure4, run_comparison

__all__ = [
    "TrainingCurve",
    "agreement_curves",
    "agreement_grid",
    "average_curve",
    "captioned",
    "checkpoint_curve",
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "image_grid",
    "pair_grid",
    "probe_figure",
    "run_comparison",
    "same_noise_boxes",
    "save_figure",
    "size_calibration",
]
