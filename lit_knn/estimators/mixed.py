"""An estimator that mixes two others."""

from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.query import Query
from lit_knn.estimators.switched import Parts


class Mixed(Parts):
    """The mixture (1 − share)·first + share·second of two estimates.

    With `OneSample` and `Exact` it moves from the noisy target to the exact one as `share` grows. In the tangent of a
    mean flow this is the family of arXiv 2605.09235, whose β is `share`. The bias is the mixture of the parts' biases.
    The parts make separate random draws.

    Args:
        first: estimator with the weight 1 − share, or in Python a module for `Network`.
        second: estimator with the weight `share`, likewise.
        share: from 0 to 1.
    """

    shardable = Parts.shardable

    def __init__(
        self, first: Estimator | nn.Module, second: Estimator | nn.Module, share: float
    ) -> None:
        super().__init__(first=first, second=second)
        if not 0 <= share <= 1:
            raise InputError(f"Mixed: share must be from 0 to 1, got {share!r}")
        self.share = share

    def mean_of(self, query: Query) -> Tensor:
        """Mix the means of both parts."""
        first = self.parts[0].mean_of(query)
        second = self.parts[1].mean_of(query)
        return first + self.share * (second - first)
