"""The score difference as a kind of the learning curves."""

from typing import Any

from benchmarks.learning_curves.grid import BANK_SIZE
from benchmarks.learning_curves.kind import Kind
from benchmarks.learning_curves.sets import Lengths
from lit_knn.modules import LitScoreDifference


class ScoreDifference(Kind):
    """`LitScoreDifference`, from the iCT run of the same seed with one-sample targets.

    A step has four times as many samples as another run's, and there are a tenth as many steps. Both posterior means
    have the run's estimator. The noise of z and the bank change with each step, and `OneSample` is no estimator of
    either mean, so that gradients are not compared.
    """

    module = LitScoreDifference
    tunes: str | None = "iCT"
    batches = 4

    def steps(self, lengths: Lengths) -> int:
        return lengths.consistency_steps // 10

    def options(self, steps: int) -> dict[str, Any]:
        """See `Kind.options`; those of configs/score_difference/digits.yaml, and three times the learning rate."""
        return {"bank_size": BANK_SIZE, "t_min": 1.0, "t_max": 8.0, "lr": 3e-3, "ema_decay": 0.95}


class ScoreDifferenceFromNothing(ScoreDifference):
    """`LitScoreDifference` from random weights, for five times as many steps."""

    tunes = None

    def steps(self, lengths: Lengths) -> int:
        return lengths.consistency_steps // 2

    def options(self, steps: int) -> dict[str, Any]:
        return super().options(steps) | {"lr": 1e-2}
