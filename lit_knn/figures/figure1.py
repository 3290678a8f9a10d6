"""Figure 1 (fig:posterior_illustration): the posterior and the nearest-neighbour proposal of points on a line."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_knn.estimators import KNN
from lit_knn.figures.style import PALETTE
from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import all_sq_dist
from lit_knn.theory.bounds import normaliser_ratio
from lit_knn.theory.posterior import log_posterior, unnormalised_log_likelihood
from lit_knn.theory.proposal import dense_log_q

(NEIGHBOUR, _), (PROPOSAL, MARKER), OTHER = PALETTE["Exact"], PALETTE["KNN"], "0.7"


def figure1(knn: KNN, reference: ReferenceSet, z: float, levels: list[float]) -> Figure:
    """Draw a panel for each noise level at the latent z; `knn` is bound to `reference`, a set of points on a line."""
    figure = Figure(figsize=(3.6 * len(levels), 3.2), layout="constrained")
    panels = figure.subplots(1, len(levels), squeeze=False)[0]
    for axes, t in zip(panels, levels, strict=True):
        _draw_panel(axes, knn, reference, z, t)
    figure.suptitle(f"The $k = {knn.k}$ points nearest to $z$, of $N = {reference.N}$", fontsize=11)
    handles = [
        Line2D([], [], color=NEIGHBOUR, linewidth=4, label="posterior, neighbours"),
        Line2D([], [], color=OTHER, linewidth=4, label="posterior, others"),
        Line2D([], [], color=PROPOSAL, marker=MARKER, linestyle="", markersize=4, label="proposal"),
        Line2D([], [], color="0.4", linestyle="--", label="$z$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_panel(axes: Axes, knn: KNN, reference: ReferenceSet, z: float, t: float) -> None:
    """Draw stems for the posterior probability of each point, and dots for its proposal probability."""
    latent = torch.full((1, *reference.shape), z, device=reference.device)
    sq_dist = all_sq_dist(reference, latent)
    proposal = knn.proposal(latent, torch.full((1,), t, dtype=torch.float64, device=reference.device))
    ratio = normaliser_ratio(unnormalised_log_likelihood(sq_dist, t), proposal.log_Zq).item()
    x = reference.gather(torch.arange(reference.N, device=reference.device)).flatten().cpu().numpy()
    posterior = log_posterior(sq_dist, t).exp()[0].cpu().numpy()
    q = dense_log_q(proposal).exp()[0].cpu().numpy()
    near = np.isin(np.arange(reference.N), proposal.ids[0].cpu().numpy())
    axes.vlines(x, 0, posterior, colors=np.where(near, NEIGHBOUR, OTHER).tolist(), linewidth=1.8)
    axes.plot(x, q, MARKER, color=PROPOSAL, markersize=3.5)
    axes.axvline(z, color="0.4", linestyle="--", linewidth=1)
    axes.set(xlabel="$x$", ylabel="probability", ylim=(0, 1.15 * max(*posterior, *q)))
    axes.set_title(f"$t = {t:g}$,  $Z_q / p_t(z) = {ratio:.2f}$")
    axes.spines[["top", "right"]].set_visible(False)
