"""The base class of the adapters: an estimator whose posterior mean is computed by the code of a checkout."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, Self

import torch

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.rng import keyed_default_rng
from lit_knn.estimators import Estimator
from lit_knn.referee.adapters.checkout import Checkout, Load, Origin
from lit_knn.reference import ReferenceSet

SEEDS = 2**62


class Adapter(Estimator):
    """An estimator that runs other people's code. Its objects live with the reference set, so copies share them.

    Args:
        checkout: folder of a checkout of the project, at the commit of `origin`.

    Raises:
        InputError: the checkout is missing or other; at `bind`, a package is missing, or the images do not fit.
    """

    origin: ClassVar[Origin]
    """The version of the project that the adapter was written for."""

    referee_note: ClassVar[str]
    """One sentence: what the code really computes."""

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout
        Checkout(type(self).__name__, checkout, self.origin)

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
        checkout = Checkout(type(self).__name__, self.checkout, self.origin)
        with checkout.importing(self._stand_ins()) as load, self._failures_told():
            return self._make(load)

    @abstractmethod
    def _make(self, load: Load) -> Any:
        """Make the object of the checkout's code from `self.reference`. `load` imports a module of the checkout."""

    def _stand_ins(self) -> Mapping[str, ModuleType]:
        """Return modules that replace packages which the checkout imports, but which do not enter the estimate."""
        return {}

    @contextmanager
    def _running(self, generator: torch.Generator | None) -> Iterator[None]:
        """Run the checkout's code: its draws come from `generator`, and its errors become one line.

        The code draws from PyTorch's default generators. They are seeded inside the block, and restored after it.
        """
        device = self.reference.device
        with self._drawing_from(generator, device), self._failures_told():
            yield

    @staticmethod
    def _drawing_from(generator: torch.Generator | None, device: torch.device) -> Any:
        if generator is None:
            return nullcontext()
        seed = torch.randint(SEEDS, (), generator=generator, device=generator.device)
        return keyed_default_rng(device, int(seed))

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{type(self).__name__}: the code of {self.checkout} fails: {told}") from error


def check_pixels(estimator: Estimator) -> None:
    """Refuse a reference set whose images are not uint8."""
    dtype = estimator.reference.local.images.dtype
    if dtype != torch.uint8:
        raise InputError(f"{type(estimator).__name__}: its code needs uint8 images, got {dtype}")


def check_square(estimator: Estimator) -> None:
    """Refuse a reference set whose images are not (C, H, H)."""
    shape = estimator.reference.shape
    if len(shape) != 3 or shape[1] != shape[2]:
        raise InputError(f"{type(estimator).__name__}: its code needs square images (C, H, H), got {shape}")
