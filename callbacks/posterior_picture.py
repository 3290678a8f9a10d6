"""Figure 1 (fig:posterior_illustration): the posterior and the nearest-neighbour proposal on a line."""

from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pytorch_lightning.utilities import rank_zero_info

from callbacks.latents import check_stage, data_reference, noise_grid
from callbacks.results import check_new, save_figure, show_figure
from lit_knn.errors import InputError
from lit_knn.estimators import KNN
from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import all_sq_dist
from lit_knn.theory.bounds import normaliser_ratio
from lit_knn.theory.posterior import log_posterior, unnormalised_log_likelihood
from lit_knn.theory.proposal import dense_log_q

NEIGHBOUR, OTHER, PROPOSAL = "#0072B2", "#9ecae1", "#D55E00"
FIGURE_NAME = "figure1"


class PosteriorPicture(pl.Callback):
    """At validation, draw the posterior p_t(x|z) and the proposal q_t(x|z) of a one-dimensional data set.

    One panel for each noise level; `figure1.png` and `.pdf` in the run's folder, and TensorBoard.

    Args:
        k: neighbours of the proposal.
        z: the latent, one number.
        noise_levels: the panels.

    Raises:
        InputError: a noise level that is not above 0; at `setup`, a run of `fit`, data of more than one dimension,
            k > N, or results of an earlier run in the run's folder.
    """

    def __init__(self, k: int = 8, z: float = 0.12, noise_levels: tuple[float, ...] = (0.02, 0.2, 3.0)) -> None:
        self.knn = KNN(k=k, n=1)
        self.z = float(z)
        self.levels = noise_grid("PosteriorPicture", noise_levels, 0, 0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be drawn."""
        check_stage("PosteriorPicture", stage)
        reference = data_reference("PosteriorPicture", trainer)
        if reference.d != 1:
            raise InputError(f"PosteriorPicture: the data must have one dimension, it has {reference.d}")
        self.knn.bind(reference)
        check_new("PosteriorPicture", trainer, f"{FIGURE_NAME}.png")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw."""
        log_dir = trainer.log_dir  # a collective: every rank must ask
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        figure = posterior_figure(self.knn, data_reference("PosteriorPicture", trainer), self.z, self.levels)
        paths = save_figure(figure, Path(log_dir or trainer.default_root_dir) / FIGURE_NAME)
        show_figure(trainer, FIGURE_NAME, figure)
        rank_zero_info(f"Posterior and proposal are in {paths[0]}")


def posterior_figure(knn: KNN, reference: ReferenceSet, z: float, levels: list[float]) -> Figure:
    """Draw one panel for each noise level.

    Args:
        knn: bound to `reference`.
        reference: points of one dimension.
        z: the latent.
        levels: noise levels.
    """
    figure = Figure(figsize=(3.6 * len(levels), 3.2), layout="constrained")
    panels = figure.subplots(1, len(levels), squeeze=False)[0]
    for axes, t in zip(panels, levels, strict=True):
        _draw_panel(axes, knn, reference, z, t)
    panels[0].set_ylabel("probability")
    handles = [
        Line2D([], [], color=NEIGHBOUR, linewidth=4, label="posterior, neighbours"),
        Line2D([], [], color=OTHER, linewidth=4, label="posterior, others"),
        Line2D([], [], color=PROPOSAL, marker="o", linestyle="", markersize=4, label="proposal"),
        Line2D([], [], color="0.4", linestyle="--", label="$z$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_panel(axes: Axes, knn: KNN, reference: ReferenceSet, z: float, t: float) -> None:
    """Stems for the posterior probability of each point, dots for its proposal probability."""
    latent = torch.full((1, *reference.shape), z, device=reference.device)
    sq_dist = all_sq_dist(reference, latent)
    proposal = knn.proposal(latent, torch.full((1,), t, dtype=torch.float64, device=reference.device))
    ratio = normaliser_ratio(unnormalised_log_likelihood(sq_dist, t), proposal.log_Zq).item()
    x = reference.gather(torch.arange(reference.N, device=reference.device)).flatten().cpu().numpy()
    posterior = log_posterior(sq_dist, t).exp()[0].cpu().numpy()
    q = dense_log_q(proposal).exp()[0].cpu().numpy()
    near = np.isin(np.arange(reference.N), proposal.ids[0].cpu().numpy())
    axes.vlines(x, 0, posterior, colors=np.where(near, NEIGHBOUR, OTHER).tolist(), linewidth=1.8)
    axes.plot(x, q, "o", color=PROPOSAL, markersize=3.5)
    axes.axvline(z, color="0.4", linestyle="--", linewidth=1)
    axes.set(title=f"$t = {t:g}$,  $Z_q / p_t(z) = {ratio:.2f}$", xlabel="$x$", ylim=(0, 1.15 * max(*posterior, *q)))
    axes.spines[["top", "right"]].set_visible(False)
