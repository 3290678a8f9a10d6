"""The base class of the adapters: an estimator whose posterior mean is computed by the code of a checkout."""

from abc import abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators import Estimator
from lit_knn.referee.adapters.checkout import Origin, checked, importing
from lit_knn.reference import ReferenceSet


class Adapter(Estimator):
    """An estimator that runs other people's code. Its objects live with the reference set, so copies share them.

    The code draws from PyTorch's default generators, which `posterior_mean` seeds from its own.

    Args:
        checkout: folder of a checkout of the project, at the commit of `origin`.
    """

    origin: ClassVar[Origin]  # the version of the project that the adapter was written for
    referee_note: ClassVar[str]  # one sentence: what the code really computes
    needs_pixels: ClassVar[bool] = False  # whether the code takes only uint8 images
    needs_square: ClassVar[bool] = False  # whether the code takes only images (C, H, H)
    stand_ins: ClassVar[Mapping[str, ModuleType]] = {}  # replace imported packages that do not enter the estimate

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout
        self._root = checked(checkout, self.origin)

    def bind(self, reference: ReferenceSet) -> Self:
        """Import the checkout and hand the images to its code."""
        super().bind(reference)
        _ = self.theirs
        return self

    @property
    def theirs(self) -> Any:
        """The object of the checkout's code that holds the images."""
        settings = repr(sorted(self.settings().items()))
        return self.reference.cached((type(self), settings), self._build)

    def _build(self) -> Any:
        name, dtype, shape = type(self).__name__, self.reference.images.dtype, self.reference.shape
        if self.needs_pixels and dtype != torch.uint8:
            raise InputError(f"{name}: its code needs uint8 images, got {dtype}")
        if self.needs_square and (len(shape) != 3 or shape[1] != shape[2]):
            raise InputError(f"{name}: its code needs square images (C, H, H), got {shape}")
        with importing(self._root, self.stand_ins):
            return self._make()

    @abstractmethod
    def _make(self) -> Any:
        """Make the object of the checkout's code from `self.reference`. `import_module` finds its modules here."""

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        """Compute the mean of z (B, *shape), float32, by the checkout's code; x is its source if `uses_source`."""
        return self.theirs(z, t.float())

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self._mean(z.float(), t.flatten(), None if x_source is None else x_source.float())
