"""The base of the generative models: a network under its preconditioning, seeds, classes and a description."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.guidance import Denoiser, check_guidance, guided
from lit_knn.nets.architecture import architecture_of
from lit_knn.sampling import seeded_classes
from lit_knn.schedules import check_num_steps


class GenerativeModel(nn.Module):
    """A network under its preconditioning, and all that its sampler needs. Subclasses define the sampler.

    An image depends on its seed, its class and the number of steps, not on the other images of its batch, except for
    rounding.

    Args:
        network: the preconditioned network (z (B, *shape), t (B,), class_label (B,) or None) -> (B, *shape).
        image_shape: shape of one image.
        num_steps: sampling steps, if a call of `sample` gives none; None if the sampler chooses its own.
        sampling_class: class of all images of a class-conditional network, if a call gives none; None draws the class
            of each image from its seed.
        guidance: weight w of classifier-free guidance, if a call gives none; see `lit_knn.guidance.guided`.
        drops_labels: whether the network was trained without classes, too (`label_dropout`); guidance needs it. Of
            files by others, what they tell; set the attribute if you know better.

    Raises:
        InputError: a value of the wrong type or out of its range.
    """

    kind: ClassVar[str]
    """Name of the kind of model in files."""

    def __init__(
        self,
        network: nn.Module,
        image_shape: Sequence[int],
        num_steps: int | None,
        sampling_class: int | None = None,
        guidance: float = 1.0,
        drops_labels: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.image_shape = _checked_shape(image_shape)
        if num_steps is not None:
            check_num_steps(num_steps)
        self.num_steps = num_steps
        if sampling_class is not None:
            _check_class("sampling_class", sampling_class, self.num_classes)
        self.sampling_class = sampling_class
        if not isinstance(drops_labels, bool):
            raise InputError(f"drops_labels must be true or false, got {drops_labels!r:.80}")
        self.drops_labels = drops_labels
        self.guidance = self._checked(guidance)

    @classmethod
    @abstractmethod
    def around(cls, net: nn.Module, image_shape: Sequence[int], **options: Any) -> "GenerativeModel":
        """Make the model of a raw network and the values that `options` returned."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return what the model needs beside the network and the shape of its images, as plain values."""

    def guidance_options(self) -> dict[str, Any]:
        """Return the options of guidance that are not the defaults."""
        options: dict[str, Any] = {} if self.guidance == 1 else {"guidance": self.guidance}
        return options if self.drops_labels or not self.num_classes else {**options, "drops_labels": False}

    @property
    @abstractmethod
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""

    @abstractmethod
    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int | None, class_label: Tensor | None, guidance: float
    ) -> Tensor:
        """Draw one image per seed, see `sample`; the arguments are checked."""

    def check_steps(self, num_steps: int | None) -> None:
        """Raise InputError if the sampler cannot take this number of steps; None is for one that chooses its own."""
        check_num_steps(num_steps)

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 if the network is unconditional."""
        return int(getattr(self.net, "num_classes", 0))

    @property
    def device(self) -> torch.device:
        """The device of the weights, on which the images are made."""
        return next(self.parameters()).device

    def forward(self, z: Tensor, t: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Evaluate the preconditioned network at z (B, *shape) and t (B,); returns (B, *shape)."""
        return self.network(z, t, class_label)

    @torch.no_grad()
    def sample(
        self,
        seeds: Sequence[int] | Tensor,
        num_steps: int | None = None,
        class_label: int | Sequence[int] | Tensor | None = None,
        guidance: float | None = None,
    ) -> Tensor:
        """Draw one image per seed: (B, *shape), float32, model space, on the device of the weights.

        Args:
            seeds: (B,), non-negative integers. `lit-knn predict` uses 0, 1, 2, …
            num_steps: sampling steps; None for the model's own number.
            class_label: one class for all images, or (B,) classes; None for `sampling_class`, or classes drawn from the
                seeds.
            guidance: w of D(z; none) + w·(D(z; class) − D(z; none)); None for the model's own. 1 is the conditional
                model, 0 the unconditional one; others evaluate the network twice. All but 1 need a network that was
                trained with `label_dropout` (`drops_labels`).

        Raises:
            InputError: no seed or an impossible one, a class that the network does not know, another number of classes
                than seeds, an impossible number of steps, a guidance below 0 or of a model that has none.
        """
        _check_seeds(seeds)
        steps = self.num_steps if num_steps is None else num_steps
        weight = self.guidance if guidance is None else self._checked(guidance)
        return self.draw(seeds, steps, self.labels(seeds, class_label), weight)

    def _checked(self, guidance: object) -> float:
        return check_guidance(guidance, self.num_classes, self.drops_labels)

    def guided_network(self, class_label: Tensor | None, guidance: float) -> Denoiser:
        """Return the preconditioned network as a function of (z, t), with classes (B,) or None, and guidance."""
        return guided(partial(self.network, class_label=class_label), self.network, guidance)

    def description(self) -> dict[str, Any]:
        """Describe the model without its weights, as plain values; `architecture` is None if the net is a user's."""
        return {
            "kind": self.kind,
            "image_shape": list(self.image_shape),
            "options": self.options(),
            "architecture": architecture_of(self.net),
        }

    def labels(self, seeds: Sequence[int] | Tensor, class_label: int | Sequence[int] | Tensor | None) -> Tensor | None:
        """Return the class of each image, (B,) int64, or None for an unconditional model; see `sample`."""
        chosen = self.sampling_class if class_label is None else class_label
        if chosen is None:
            return seeded_classes(seeds, self.num_classes, self.device) if self.num_classes else None
        if isinstance(chosen, int):
            _check_class("class_label", chosen, self.num_classes)
            return torch.full((len(seeds),), chosen, device=self.device)
        labels = torch.as_tensor(chosen, device=self.device)
        if labels.shape != (len(seeds),) or labels.is_floating_point():
            raise InputError(f"sample: class_label must be an integer, or one for each of {len(seeds)} seeds")
        for label in labels.aminmax() if len(labels) else ():
            _check_class("class_label", int(label), self.num_classes)
        return labels

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        classes = f"{self.num_classes} classes" if self.num_classes else "unconditional"
        count = sum(parameter.numel() for parameter in self.net.parameters())
        net = type(self.net).__name__
        steps = "steps of its own" if self.num_steps is None else f"{self.num_steps} step{'s' * (self.num_steps > 1)}"
        return f"{type(self).__name__}({net}, {shape} images, {classes}, {count:,} parameters, {steps})"


def check_numbers(**options: object) -> None:
    """Raise InputError for the first option that is not a positive finite number."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"{name} must be a positive number, got {value!r:.80}")


def named(option: str, told: object, known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split {"class": …, …} into the name of a known class and its options."""
    name = told.get("class") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not isinstance(name, str) or name not in known:
        raise InputError(f"{option} must name one of {', '.join(known)} as its class, got {told!r:.80}")
    return name, without(told, "class")


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options except one."""
    return {option: value for option, value in options.items() if option != name}


def is_known(thing: object, known: dict[str, Any]) -> bool:
    """Tell whether a file can name the class of `thing`."""
    return known.get(type(thing).__name__) is type(thing)


def _check_seeds(seeds: object) -> None:
    """Raise InputError if these are not some non-negative integers; a tensor may have any type of integers."""
    if isinstance(seeds, Tensor):
        found = [] if seeds.is_floating_point() or seeds.dim() != 1 else seeds.tolist()
    else:
        found = list(seeds) if isinstance(seeds, Iterable) else []
    if not found or not all(isinstance(seed, Integral) and int(seed) >= 0 for seed in found):
        raise InputError(f"sample: seeds must be non-negative integers, at least one, got {seeds!r:.80}")


def _checked_shape(shape: object) -> tuple[int, ...]:
    sides = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        raise InputError(f"image_shape must be a list of positive integers, got {shape!r:.80}")
    return sides


def _check_class(name: str, label: object, num_classes: int) -> None:
    if type(label) is not int or not 0 <= label < num_classes:
        raise InputError(f"{name}={label!r:.80}, but the network has num_classes={num_classes}")
