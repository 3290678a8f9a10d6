"""Figure 1 (fig:posterior_illustration): posterior and nearest-neighbour proposal on a line."""

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

NEIGHBOUR = PALETTE["Exact"][0]
PROPOSAL, MARKER = PALETTE["KNN"]
OTHER = "0.7"


def figure1(knn: KNN, reference: ReferenceSet, z: float, levels: list[float]) -> Figure:
    """Draw a panel for each noise level at the latent z.

    Args:
        knn: bound to `reference`.
        reference: a set of points on a line.
        z: the latent.
        levels: noise levels.
    """
    figure = Figure(figsize=(3.6 * len(levels), 3.2), layout="constrained")
    panels = figure.subplots(1, len(levels), squeeze=False)[0]
    for axes, t in zip(panels, levels, strict=True):
        _draw_panel(axes, knn, reference, z=z, t=t)

    title = f"The $k = {knn.k}$ points nearest to $z$, of $N = {reference.N}$"
    figure.suptitle(title, fontsize=11)

    dots = Line2D([], [], color=PROPOSAL, label="proposal", linestyle="", markersize=4)
    dots.set(marker=MARKER)
    handles = [
        Line2D([], [], color=NEIGHBOUR, linewidth=4, label="posterior, neighbours"),
        Line2D([], [], color=OTHER, linewidth=4, label="posterior, others"),
        dots,
        Line2D([], [], color="0.4", linestyle="--", label="$z$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_panel(axes: Axes, knn: KNN, reference: ReferenceSet, z: float, t: float) -> None:
    """Draw each point's posterior probability as a stem, and its probability under the proposal as a dot."""
    device = reference.device
    latent = torch.full((1, *reference.shape), z, device=device)
    level = torch.full((1,), t, dtype=torch.float64, device=device)
    x = reference.gather(torch.arange(reference.N, device=device)).flatten().cpu().numpy()

    sq_dist = all_sq_dist(reference, latent)
    posterior = log_posterior(sq_dist, t).exp()[0].cpu().numpy()
    proposal = knn.proposal(latent, level)
    q = dense_log_q(proposal).exp()[0].cpu().numpy()
    ratio = normaliser_ratio(unnormalised_log_likelihood(sq_dist, t), proposal.log_Zq).item()

    is_near = np.isin(np.arange(reference.N), proposal.ids[0].cpu().numpy())
    colours = np.where(is_near, NEIGHBOUR, OTHER).tolist()
    axes.vlines(x, 0, posterior, colors=colours, linewidth=1.8)
    axes.plot(x, q, MARKER, color=PROPOSAL, markersize=3.5)
    axes.axvline(z, color="0.4", linestyle="--", linewidth=1)

    # The axis has some room above the highest mark.
    highest = max(posterior.max(), q.max())
    axes.set(xlabel="$x$", ylabel="probability", ylim=(0, 1.15 * highest))
    axes.set_title(f"$t = {t:g}$,  $Z_q / p_t(z) = {ratio:.2f}$")
    axes.spines[["top", "right"]].set_visible(False)
