"""Draw rows of results as matplotlib figures, including those of the paper.

The modules hold more than these names.
"""

from lit_knn.figures.best_curve import average_curve, checkpoint_curve
from lit_knn.figures.figure1 import figure1
from lit_knn.figures.figure2 import figure2
from lit_knn.figures.figure3 import figure3
from lit_knn.figures.figure4 import figure4
from lit_knn.figures.figure5 import figure5
from lit_knn.figures.image_grid import captioned, image_grid
from lit_knn.figures.particles import particles_figure
from lit_knn.figures.probe import probe_figure
from lit_knn.figures.sample_picture import sample_picture
from lit_knn.figures.style import save_figure
from lit_knn.figures.training_curves import run_comparison
from lit_knn.figures.trajectory_error import trajectory_error

__all__ = [
    "average_curve",
    "captioned",
    "checkpoint_curve",
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "image_grid",
    "particles_figure",
    "probe_figure",
    "run_comparison",
    "sample_picture",
    "save_figure",
    "trajectory_error",
]
