"""Variants of training modules for experiments: squared losses, and other options of ECT."""

from types import MappingProxyType
from typing import Any

from benchmarks.learning_curves.few_step_kinds import ECT, MeanFlow
from lit_knn.sampling.distances import squared_euclidean


class SquaredECT(ECT):
    """`LitECT` with the squared distance: where r = 0, all targets without bias have one optimum."""

    fixed = MappingProxyType({"metric": squared_euclidean})


class VariedECT(ECT):
    """`LitECT` with other options, whose averages of all lengths are measured.

    Args:
        options: the options that differ from those of `ECT`.
    """

    more_averages = True

    def __init__(self, **options: float) -> None:
        self.varied = options

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | self.varied


class SquaredMeanFlow(MeanFlow):
    """`LitMeanFlow` without the adaptive weight, so that all targets without bias have one optimum."""

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | {"power": 0.0}
