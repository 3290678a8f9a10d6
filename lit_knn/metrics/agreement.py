"""How like two sets of images are: squared error, coefficient of determination and correlation, image by image."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lit_knn.metrics.estimator_error import MeanAndError

Row = dict[str, Any]


class Agreement(NamedTuple):
    """Likeness of outputs to the outputs of a network, per image. All are (B,), float64.

    With w the network's output, y the other one, both flattened to d values, and w̄, ȳ their means over these values:

    Attributes:
        mse: ‖y − w‖² / d.
        r2: the coefficient of determination, 1 − ‖y − w‖² / ‖w − w̄‖²; at most 1, and negative if w̄ is nearer to w
            than y. Analytic Diffusion Studio reports it (with a variance over d − 1: its 1 − R² is smaller by 1/d).
        pearson_r: the correlation ⟨y − ȳ, w − w̄⟩ / (‖y − ȳ‖·‖w − w̄‖). The public code of Kamb and Ganguli computes
            this and calls it r². It forgives another contrast and brightness, which the other measures do not.
        pearson_r2: its square.
    """

    mse: Tensor
    r2: Tensor
    pearson_r: Tensor
    pearson_r2: Tensor


MEASURES = Agreement._fields
COLUMNS = {f"{name}{end}": float for name in MEASURES for end in ("", "_se")}  # those of `averaged`


def agreement(outputs: Tensor, network_outputs: Tensor) -> Agreement:
    """Compare images y with those of a network w, both (B, *shape). Images of a single value give NaN or −∞."""
    y, w = outputs.double().flatten(1), network_outputs.double().flatten(1)
    residual = (y - w).square().sum(1)
    y, w = (v - v.mean(1, keepdim=True) for v in (y, w))
    pearson_r = (y * w).sum(1) / (y.norm(dim=1) * w.norm(dim=1))
    return Agreement(residual / w.shape[1], 1 - residual / w.square().sum(1), pearson_r, pearson_r.square())


def averaged(measured: Mapping[str, MeanAndError]) -> Row:
    """Return mean and standard error (`_se`) of each measure as columns of a row."""
    row: Row = {}
    for name, (mean, error) in measured.items():
        row |= {name: mean, f"{name}_se": error}
    return row


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of these columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
