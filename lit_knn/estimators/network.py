"""A trained EDM network as an estimator."""

from os import PathLike

import torch
from torch import Tensor, nn

from lit_knn.edm_checkpoint import load_network
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator


class Network(Estimator):
    """The denoiser D(z, σ) of a trained EDM network, which estimates E[x|z,σ]: biased, deterministic.

    Needs no reference set and no randomness. Class-conditional networks take `labels`, and are used without a class
    where there are none.

    Args:
        path: a published `.pkl` (none of its code is run), a file converted from it by `python -m
            lit_knn.edm_checkpoint`, or a `.ckpt` of `LitEDM`, of which the averaged weights are taken.
        net: the architecture, for a `.ckpt` that does not tell it; null for published networks.
        fp16: compute the network in float16 but for its embedding, as EDM's own code does on GPUs for files with
            `use_fp16`; the weights stay in float32.

    Raises:
        InputError: the file is missing, cannot be read, holds another architecture, or tells none and `net` is not
            given.
    """

    needs_reference = False
    deterministic = True

    def __init__(self, path: str | PathLike[str], net: nn.Module | None = None, fp16: bool = False) -> None:
        try:
            self.denoiser = load_network(path, net, fp16)
        except InputError as error:
            raise InputError(f"Network: path={error}") from error

    @property
    def num_classes(self) -> int:
        """Number of classes that the network knows, 0 if it is unconditional."""
        return getattr(self.denoiser.model, "num_classes", 0)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self.denoiser.to(z.device)(z, t)

    def _class_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        lowest, highest = labels.aminmax()
        if lowest < 0 or highest >= self.num_classes:
            raise InputError(
                f"Network: labels are {lowest.item()} to {highest.item()}, but the net has "
                f"num_classes={self.num_classes}"
            )
        return self.denoiser.to(z.device)(z, t, labels)
