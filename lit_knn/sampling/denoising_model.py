"""The base of the models that have a denoiser."""

from abc import abstractmethod
from functools import partial

from torch import Tensor

from lit_knn.nets.flow import FlowDenoiser
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling.guidance import Denoiser, guided
from lit_knn.sampling.model import GenerativeModel
from lit_knn.sampling.model_inputs import Labels


class DenoisingModel(GenerativeModel):
    """A model that has a denoiser: a diffusion or a flow model."""

    @property
    @abstractmethod
    def denoiser(self) -> EDMPrecond | FlowDenoiser:
        """The network as D(z, σ, class_label=None)."""

    def posterior_mean(
        self, z: Tensor, sigma: Tensor | float, class_label: Labels | None = None
    ) -> Tensor:
        """Return the denoised E[x | x + σε = z], (B, *shape) float32.

        Args:
            z: (B, *shape), float.
            sigma: noise level of each item, (B,), or one for all.
            class_label: see `forward`.
        """
        levels, labels = self.checked(z, sigma, class_label)
        return self.denoiser(z, levels, labels)

    def guided_network(self, class_label: Tensor | None, guidance: float) -> Denoiser:
        """Return f(z, t): the preconditioned network for these classes, (B,) or None, under guidance."""
        conditional = partial(self.network, class_label=class_label)
        return guided(conditional, self.network, guidance)

    def guidance_options(self) -> dict[str, object]:
        """Return the options of guidance that differ from their defaults."""
        options: dict[str, object] = {}
        if self.guidance != 1:
            options["guidance"] = self.guidance
        if self.num_classes and not self.drops_labels:
            options["drops_labels"] = False
        return options
