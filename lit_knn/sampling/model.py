"""The base of the generative models: a network under its preconditioning, seeds, classes and a description."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, check_at_least
from lit_knn.nets.architecture import architecture_of
from lit_knn.nets.base import NO_CLASS, class_number, classes_of
from lit_knn.sampling.described_parts import ModelDescription
from lit_knn.sampling.guidance import check_guidance
from lit_knn.sampling.model_inputs import Labels, checked_times, class_numbers
from lit_knn.sampling.samplers import seeded_classes


class GenerativeModel(nn.Module):
    """A preconditioned network with the settings of its sampler. Subclasses define the sampler.

    An image depends on its seed, its class and the number of steps. The other images of its batch
    change only its rounding.

    Args:
        network: the preconditioned network (z (B, *shape), t (B,), class_label (B,) or None) -> (B, *shape).
        image_shape: shape of one image.
        num_steps: sampling steps, if a call of `sample` gives none. Subclasses check it.
        sampling_class: class of all images of a class-conditional network, if a call gives none; None draws the class
            of each image from its seed.
        guidance: weight w of classifier-free guidance, if a call gives none; see `lit_knn.sampling.guidance.guided`.
        drops_labels: whether training dropped some class labels (`label_dropout`); guidance needs this. For a
            published file it is what the file states; set the attribute if that is wrong.
    """

    kind: ClassVar[str]
    """Name of the kind of model in files."""

    def __init__(
        self,
        network: nn.Module,
        image_shape: Sequence[int],
        num_steps: int,
        sampling_class: int | None = None,
        guidance: float = 1.0,
        drops_labels: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.image_shape = tuple(image_shape)
        self.num_steps = num_steps
        self.drops_labels = drops_labels

        if sampling_class is not None:
            # Called for the error that it raises.
            class_number("sampling_class", self.net, sampling_class)
        self.sampling_class = sampling_class
        self.guidance = check_guidance(guidance, self.num_classes, drops_labels)

    @classmethod
    @abstractmethod
    def around(
        cls, net: nn.Module, image_shape: Sequence[int], **options: Any
    ) -> "GenerativeModel":
        """Make the model from a raw network and the values that `options` returned."""

    @abstractmethod
    def options(self) -> dict[str, object]:
        """Return the settings of the model as plain values, without the network and the shape."""

    def check_steps(self, num_steps: int) -> None:
        """Raise InputError if the sampler cannot take this number of steps."""
        check_at_least(1, num_steps=num_steps)

    @abstractmethod
    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        """Draw one image per seed: (B, *shape), float32. Subclasses implement it; see `sample`.

        Args:
            seeds: (B,), non-negative integers.
            num_steps: sampling steps.
            labels: class of each image, (B,) int64, or None for an unconditional network.
            guidance: weight of classifier-free guidance; 1 is none.
        """

    @property
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""
        return self.network.model  # type: ignore[return-value]

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 if the network is unconditional."""
        return classes_of(self.net)

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes 0, 1, …, or None if they have none."""
        return getattr(self.net, "class_names", None)

    @property
    def device(self) -> torch.device:
        """The device of the weights, on which the images are made."""
        return next(self.parameters()).device

    def forward(self, z: Tensor, t: Tensor | float, class_label: Labels | None = None) -> Tensor:
        """Evaluate the network at z and its time: (B, *shape).

        Args:
            z: (B, *shape), float.
            t: the time of each item, (B,) or (B, 1, …, 1), or one number for all.
            class_label: one class for all items, or (B,) classes, by number or by name.
        """
        low, high = self.times_range()
        times, labels = self.checked(z, t, class_label, low=low, high=high)
        return self.network(z, times, labels)

    def times_range(self) -> tuple[float, float]:
        """Return the bounds of the times t that `forward` takes; a bound of 0 or infinity is excluded."""
        return 0.0, math.inf

    def checked(
        self,
        z: Tensor,
        t: Tensor | float,
        class_label: Labels | None,
        low: float = 0.0,
        high: float = math.inf,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the times, (B,), of a float type, and the classes, (B,) or None, on the device of `z`.

        Raises InputError for arguments that `forward` does not take.

        Args:
            z: see `forward`.
            t: see `forward`.
            class_label: see `forward`; a network may also take weights of the classes, (B, num_classes).
            low: the lowest time; 0 is excluded.
            high: the highest time; infinity is excluded.
        """
        if z.shape[1:] != self.image_shape or not z.is_floating_point():
            sides = ", ".join(map(str, self.image_shape))
            raise InputError(f"z must be float (B, {sides}), got {tuple(z.shape)}")

        times = checked_times(z, t, low, high)
        if class_label is None:
            return times, None
        # The network checks weights of the classes itself.
        if isinstance(class_label, Tensor) and class_label.dim() == 2:
            return times, class_label

        classes = class_numbers(self.net, class_label, len(z), also_valid=(NO_CLASS,))
        return times, classes.to(z.device)

    @torch.no_grad()
    def sample(
        self,
        seeds: Sequence[int] | Tensor,
        num_steps: int | None = None,
        class_label: Labels | None = None,
        guidance: float | None = None,
    ) -> Tensor:
        """Draw one image per seed: (B, *shape), float32, model space, on the device of the weights.

        Args:
            seeds: (B,), non-negative integers. `lit-knn predict` uses 0, 1, 2, …
            num_steps: sampling steps; None for the model's own number.
            class_label: one class for all images, or (B,) classes, by number or by name; None for `sampling_class`, or
                classes drawn from the seeds.
            guidance: w of D(z; none) + w·(D(z; class) − D(z; none)); None for the model's own. 1 is the conditional
                model, 0 the unconditional one; others evaluate the network twice. All but 1 need a network that was
                trained with `label_dropout` (`drops_labels`).
        """
        if num_steps is None:
            num_steps = self.num_steps
        if guidance is None:
            guidance = self.guidance

        weight = check_guidance(guidance, self.num_classes, self.drops_labels)
        return self.draw(seeds, num_steps, self.labels(seeds, class_label), weight)

    def labels(self, seeds: Sequence[int] | Tensor, class_label: Labels | None) -> Tensor | None:
        """Return the class of each image, (B,) int64, or None for an unconditional model; see `sample`."""
        chosen = self.sampling_class if class_label is None else class_label
        if chosen is not None:
            return class_numbers(self.net, chosen, len(seeds)).to(self.device)

        if not self.num_classes:
            return None
        return seeded_classes(seeds, self.num_classes, self.device)

    def description(self) -> ModelDescription:
        """Describe the model without its weights, as plain values."""
        description: ModelDescription = {
            "kind": self.kind,
            "image_shape": list(self.image_shape),
            "options": self.options(),
            "architecture": architecture_of(self.net),
        }
        if self.class_names:
            description["class_names"] = self.class_names
        return description

    def __repr__(self) -> str:
        net = type(self.net).__name__
        shape = "x".join(map(str, self.image_shape))
        count = sum(parameter.numel() for parameter in self.net.parameters())

        classes = "unconditional"
        if self.num_classes:
            classes = f"{self.num_classes} classes"

        steps = f"{self.num_steps} step"
        if self.num_steps > 1:
            steps += "s"

        facts = f"{net}, {shape} images, {classes}, {count:,} parameters, {steps}"
        return f"{type(self).__name__}({facts})"
