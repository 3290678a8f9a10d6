"""A trained EDM network as an estimator."""

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_knn.edm_checkpoint import load_network_parts
from lit_knn.errors import InputError
from lit_knn.estimators.base import Estimator
from lit_knn.nets import network_from_config
from lit_knn.precond import EDMPrecond


class Network(Estimator):
    """The denoiser D(z, σ) of a trained EDM network, which estimates E[x|z,σ]: biased, deterministic.

    Needs no reference set and no randomness. Class-conditional networks take `labels`, and are used without a class
    where there are none.

    Args:
        path: a published `.pkl` (none of its code is run), a file converted from it by `python -m
            lit_knn.edm_checkpoint`, or a `.ckpt` of `LitEDM`, of which the averaged weights are taken.
        net: the architecture, for a `.ckpt`, which does not tell it; null for published networks.

    Raises:
        InputError: the file is missing, cannot be read, holds another architecture, or tells none and `net` is not
            given.
    """

    needs_reference = False
    deterministic = True

    def __init__(self, path: str | PathLike[str], net: nn.Module | None = None) -> None:
        if not Path(path).is_file():
            raise InputError(f"Network: path={path}: no such file")
        config, state_dict = load_network_parts(path)
        if net is None and "model_type" not in config:
            raise InputError(f"Network: path={path} does not tell its architecture: give net")
        self.denoiser = EDMPrecond(network_from_config(config) if net is None else net, config.get("sigma_data", 0.5))
        try:
            self.denoiser.load_state_dict(state_dict)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"Network: path={path} does not fit the architecture: {reason}") from error
        self.denoiser.eval().requires_grad_(False)

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        return self.denoiser.to(z.device)(z, t)

    def _class_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None, labels: Tensor
    ) -> Tensor:
        known = getattr(self.denoiser.model, "num_classes", 0)
        lowest, highest = labels.aminmax()
        if lowest < 0 or highest >= known:
            raise InputError(
                f"Network: labels are {lowest.item()} to {highest.item()}, but the net has num_classes={known}"
            )
        return self.denoiser.to(z.device)(z, t, labels)
