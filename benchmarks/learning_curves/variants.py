"""Variants of training modules for experiments: squared losses, and other options of ECT."""

from types import MappingProxyType
from typing import Any

from benchmarks.learning_curves.few_step_kinds import ECT, MeanFlow
from benchmarks.learning_curves.kind import NOT_MEASURED
from benchmarks.learning_curves.sct_kind import SCT
from lit_knn.modules.time_distributions import LogitNormalTimes
from lit_knn.sampling.distances import squared_euclidean


class SquaredECT(ECT):
    """`LitECT` with the squared distance: where r = 0, all targets without bias have one optimum."""

    fixed = MappingProxyType({"metric": squared_euclidean})


class VariedECT(ECT):
    """`LitECT` with other options, whose averages of all lengths are measured at the end.

    Args:
        options: the options that differ from those of `ECT`.
    """

    more_averages = True

    def __init__(self, **options: float) -> None:
        self.varied = options

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | self.varied


class PlainSCT(SCT):
    """`LitSCT` without the norm of the derivative and without the learnt weight."""

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | {"tangent_floor": None, "adaptive_weight": False}


class SquaredMeanFlow(MeanFlow):
    """`LitMeanFlow` without the adaptive weight, so that all targets without bias have one optimum."""

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | {"power": 0.0}


class LaterMeanFlow(MeanFlow):
    """`LitMeanFlow` with the times of its authors' later recipe ("v1").

    It is measured at the pairs of the first recipe, so that its numbers compare with those of `MeanFlow`.
    """

    fixed = MappingProxyType(
        {
            **NOT_MEASURED,
            "times": LogitNormalTimes(-0.6, 1.6),
            "lower_times": LogitNormalTimes(-4.0, 1.6),
        }
    )
