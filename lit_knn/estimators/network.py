"""A trained network as an estimator."""

from os import PathLike

from torch import Generator, Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.common.memory import to_device
from lit_knn.estimators.base import Estimator
from lit_knn.nets.average_velocity import AverageVelocity
from lit_knn.nets.base import NO_CLASS, ImageNetwork, classes_of, labels_for
from lit_knn.nets.flow import FlowDenoiser, FlowNetwork
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.sampling import GenerativeModel
from lit_knn.sampling.denoising_model import DenoisingModel
from lit_knn.sampling.loading import load_network

# Denoisers of this package, which take float64 noise levels, and labels or None.
DENOISERS = (EDMPrecond, FlowDenoiser)

# Modules of this package that are no denoisers, although they take the same arguments.
NO_DENOISERS = (ImageNetwork, ConsistencyFunction, FlowNetwork, AverageVelocity, GenerativeModel)


class Network(Estimator):
    """Estimates E[x|z,σ] with the denoiser D(z, σ) of a trained network: biased and deterministic.

    It needs no reference set and no randomness. Class-conditional networks take `labels`. Those that
    were trained with label dropout run unconditionally without labels; all do with the label
    `NO_CLASS`.

    Args:
        path: a published `.pkl` (none of its code is run), a file converted from it by `lit-knn
            convert`, a `.ckpt` of `LitEDM` or `LitFlow`, whose averaged weights are used, or the
            folder of such a run. In Python also a module in evaluation mode: a model of
            `lit_knn.load`, or any denoiser `module(z, sigma)` with sigma (B,), in the type of z, or
            `module(z, sigma, class_label)` if it has `num_classes`. It is not copied.
        net: the architecture, for a `.ckpt` that does not store it; null for published networks.
        fp16: compute the network, except its embedding, in float16, as EDM's own code does on GPUs
            for files with `use_fp16`. The weights stay in float32. Only for files.

    Raises:
        InputError: the file is missing, cannot be read, or holds another architecture; it stores no
            architecture and `net` is not given; the module is no denoiser.
    """

    needs_reference = False
    deterministic = True
    takes_labels = True
    shardable = True

    def __init__(
        self,
        path: str | PathLike[str] | nn.Module,
        net: nn.Module | None = None,
        fp16: bool = False,
    ) -> None:
        if isinstance(path, nn.Module):
            if net is not None or fp16:
                raise InputError(
                    "Network: net and fp16 are options of files, but a module is given"
                )
            self.denoiser = denoiser_of(path)
        else:
            try:
                self.denoiser = load_network(path, net, fp16)
            except InputError as error:
                raise InputError(f"Network: path={error}") from error

        # The network inside our own denoisers knows the classes.
        raw = self.denoiser.model if isinstance(self.denoiser, DENOISERS) else self.denoiser
        self.num_classes = classes_of(raw)
        # Names of the classes 0, 1, …, with which `sampling_class` chooses one, or None.
        self.class_names: list[str] | None = getattr(raw, "class_names", None)

    def __deepcopy__(self, memo: dict[int, object]) -> "Network":
        # A copy of the module that holds this estimator, such as the one for the averaged weights, would copy the
        # weights of the network, too, although nobody changes them.
        return self

    def settings(self) -> dict[str, object]:
        # Two paths may hold the same weights, so the weights are the setting, not the path.
        return {"denoiser": self.denoiser}

    def _posterior_mean(
        self,
        z: Tensor,
        t: Tensor,
        x_source: Tensor | None,
        generator: Generator | None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Denoise z."""
        self._check_labels(labels)
        if self.denoiser.training:
            raise InputError("Network: the module is in training mode: call its eval() first")

        weight = next(self.denoiser.parameters(), None)
        # Compare first, because `to` walks through all modules, which takes time.
        if weight is not None and weight.device != z.device:
            self.denoiser.to(z.device)

        sigma = t.flatten()
        labels = None if labels is None else to_device(labels, z.device)
        if isinstance(self.denoiser, DENOISERS):
            return self.denoiser(z, sigma, labels)

        sigma = sigma.to(z.dtype)
        labels = labels_for(self.denoiser, labels, z)
        return self.denoiser(z, sigma) if labels is None else self.denoiser(z, sigma, labels)

    def _check_labels(self, labels: Tensor | None) -> None:
        """Refuse labels that are no classes of the network, and None if it was never trained without labels."""
        if labels is None:
            if self.num_classes and not getattr(self.denoiser, "drops_labels", True):
                raise InputError("Network: labels missing, and the net was never trained without")
            return

        lowest, highest = labels.aminmax()
        if lowest < NO_CLASS or highest >= self.num_classes:
            problem = f"Network: labels are {lowest.item()} to {highest.item()}"
            raise InputError(f"{problem}, but the net has num_classes={self.num_classes}")


def denoiser_of(module: nn.Module) -> nn.Module:
    """Return the denoiser D(z, σ) of a module, or raise InputError if it is known to have none."""
    if isinstance(module, DenoisingModel):
        return module.denoiser.train(module.training)
    if isinstance(module, NO_DENOISERS):
        problem = f"Network: {type(module).__name__} is no denoiser D(z, sigma)"
        raise InputError(
            f"{problem}: give one such as EDMPrecond(net), or a diffusion or flow model"
        )

    return module
