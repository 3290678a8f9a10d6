"""The images that a cascade draws, with what each stage knows of its own error."""

from typing import NamedTuple

from torch import Tensor

from lit_knn.estimators.subspace_knn import SubspaceDraws


class CoarseEffect(NamedTuple):
    """Describes how the choice of candidates affects b rows of `SubspaceDraws`.

    Attributes:
        by_chance: (b, n), bool, whether the image became a candidate by chance.
        inclusion: (b, n), float64, probability of the candidate to be among the n images.
        number: (b,), number of candidates by chance.
        share: (b,), float64, their share of the candidates' posterior given P'z.
        mean: (b, r), exact mean of y over the images that are not kept; 0 beyond the leading components.
        excess: (b, r), known error of the mean of y that the choice of candidates causes.
        spread: (b,), float64, mean of ‖y − mean‖² over candidates by chance, along the leading components; 0 without
            control variate.
    """

    by_chance: Tensor
    inclusion: Tensor
    number: Tensor
    share: Tensor
    mean: Tensor
    excess: Tensor
    spread: Tensor

    def rows(self, rows: Tensor | slice, places: int) -> "CoarseEffect":
        """Select some rows and their first places."""
        return CoarseEffect(*(part[rows, :places] for part in self[:2]), *(part[rows] for part in self[2:]))


class CascadeDraws(SubspaceDraws):
    """`SubspaceDraws` among candidates, with the effect of their choice as `coarse`."""

    coarse: CoarseEffect

    @classmethod
    def of(cls, draws: SubspaceDraws, coarse: CoarseEffect) -> "CascadeDraws":
        """Join the two."""
        made = cls(*draws)
        made.coarse = coarse
        return made

    def rows(self, rows: Tensor | slice, places: int) -> "CascadeDraws":
        """Select some rows and their first places."""
        return CascadeDraws.of(super().rows(rows, places), self.coarse.rows(rows, places))
