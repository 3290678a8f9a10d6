"""The base of the generative models: a network under its preconditioning, seeds, classes and a description."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.architecture import architecture_of
from lit_knn.nets.base import NO_CLASS, class_number
from lit_knn.nets.flow import FlowDenoiser
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling.guidance import Denoiser, check_guidance, guided
from lit_knn.sampling.samplers import seeded_classes
from lit_knn.theory.noise import EDM, VP, LinearInterpolant, Process

# One class or one for each item, by number or by name.
Labels: TypeAlias = int | str | Sequence[int | str] | Tensor

# A file can name only these processes.
PROCESSES: dict[str, type[Process]] = {
    process.__name__: process for process in (EDM, VP, LinearInterpolant)
}


class GenerativeModel(nn.Module):
    """A preconditioned network with the settings of its sampler. Subclasses define the sampler.

    An image depends on its seed, its class and the number of steps, not on the other images of its batch, except for
    rounding. The constructors check all values, because files hold them.

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
        if not self.image_shape or any(
            type(side) is not int or side < 1 for side in self.image_shape
        ):
            raise InputError(
                f"image_shape must be a list of positive integers, got {image_shape!r:.80}"
            )
        self.num_steps = num_steps
        self.drops_labels = drops_labels
        if sampling_class is not None:
            class_number("sampling_class", self.net, sampling_class)
        self.sampling_class = sampling_class
        self.guidance = check_guidance(guidance, self.num_classes, drops_labels)

    @classmethod
    @abstractmethod
    def around(
        cls, net: nn.Module, image_shape: Sequence[int], **options: Any
    ) -> "GenerativeModel":
        """Make the model of a raw network and the values that `options` returned."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the settings of the model besides the network and the shape of its images, as plain values."""

    @abstractmethod
    def check_steps(self, num_steps: int) -> None:
        """Raise InputError if the sampler cannot take this number of steps."""

    @abstractmethod
    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        """Draw one image per seed, see `sample`."""

    @property
    def net(self) -> nn.Module:
        """The raw network under the preconditioning."""
        return self.network.model  # type: ignore[return-value]

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 if the network is unconditional."""
        return int(getattr(self.net, "num_classes", 0))

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes 0, 1, …, or None if they have none."""
        return getattr(self.net, "class_names", None)

    @property
    def device(self) -> torch.device:
        """The device of the weights, on which the images are made."""
        return next(self.parameters()).device

    def forward(self, z: Tensor, t: Tensor | float, class_label: Labels | None = None) -> Tensor:
        """Evaluate the network at z (B, *shape) and its time t, (B,), (B, 1, …, 1) or a number: (B, *shape)."""
        return self.network(z, *self.checked(z, t, class_label, *self.times_range()))

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

        Raises InputError for others than `forward` takes.
        """
        if z.shape[1:] != self.image_shape or not z.is_floating_point():
            raise InputError(
                f"z must be float (B, {', '.join(map(str, self.image_shape))}), got {tuple(z.shape)}"
            )
        if class_label is not None and not self.num_classes:
            raise InputError("class_label is given, but the network has num_classes=0")
        t = (
            t.to(z.device)
            if isinstance(t, Tensor)
            else torch.tensor(t, dtype=torch.float64, device=z.device)
        )
        t = t if t.is_floating_point() else t.double()
        t = t.flatten() if t.shape == (len(z), *[1] * len(self.image_shape)) else t
        if t.shape not in ((), (len(z),)):
            raise InputError(
                f"the noise level must be a number or one for each of {len(z)} z, got {tuple(t.shape)}"
            )
        # The least level may be rounded to the type of t, in which 0.7 may be below 0.7 in float64.
        inside = (
            (t > 0) & (t >= torch.tensor(low, dtype=t.dtype)) & (t.double() <= high) & t.isfinite()
        )
        if not inside.all():
            limits = f"from {low:g} to {high:g}" if low or high < math.inf else "finite"
            raise InputError(
                f"the noise level must be above 0 and {limits}, got {t[~inside][0].item():g}"
            )
        # (B, num_classes) weights of the classes are for the network to check.
        if class_label is None or (isinstance(class_label, Tensor) and class_label.dim() == 2):
            return t.expand(len(z)), class_label
        return t.expand(len(z)), self.numbers(class_label, len(z), "z", others=(NO_CLASS,)).to(
            z.device
        )

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
        steps = self.num_steps if num_steps is None else num_steps
        given = self.guidance if guidance is None else guidance
        weight = check_guidance(given, self.num_classes, self.drops_labels)
        return self.draw(seeds, steps, self.labels(seeds, class_label), weight)

    def labels(self, seeds: Sequence[int] | Tensor, class_label: Any) -> Tensor | None:
        """Return the class of each image, (B,) int64, or None for an unconditional model; see `sample`."""
        chosen = self.sampling_class if class_label is None else class_label
        if chosen is None:
            return (
                seeded_classes(seeds, self.num_classes, self.device) if self.num_classes else None
            )
        return self.numbers(chosen, len(seeds), "seeds").to(self.device)

    def numbers(
        self, chosen: Labels, count: int, counted: str, others: tuple[int, ...] = ()
    ) -> Tensor:
        """Return one class for all, or one for each of `count` items, as (count,) int64; `others` pass, too."""

        def number(label: Any) -> Any:
            return class_number("class_label", self.net, label) if isinstance(label, str) else label

        chosen = (
            [number(label) for label in chosen]
            if isinstance(chosen, list | tuple)
            else number(chosen)
        )
        labels = torch.as_tensor(chosen)
        if labels.shape not in ((), (count,)) or labels.is_floating_point():
            raise InputError(
                f"class_label must be an integer, or one for each of {count} {counted}"
            )
        for label in labels.unique().tolist():
            if label not in others:
                class_number("class_label", self.net, label)
        return labels.long().expand(count)

    def description(self) -> dict[str, Any]:
        """Describe the model without its weights, as plain values; `architecture` is None if the net is a user's."""
        return {
            "kind": self.kind,
            "image_shape": list(self.image_shape),
            "options": self.options(),
            "architecture": architecture_of(self.net),
            **({"class_names": self.class_names} if self.class_names else {}),
        }

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        classes = f"{self.num_classes} classes" if self.num_classes else "unconditional"
        count = sum(parameter.numel() for parameter in self.net.parameters())
        steps = f"{self.num_steps} step{'s' * (self.num_steps > 1)}"
        net = type(self.net).__name__
        return f"{type(self).__name__}({net}, {shape} images, {classes}, {count:,} parameters, {steps})"


class DenoisingModel(GenerativeModel):
    """A model that has a denoiser: a diffusion or a flow model."""

    @property
    @abstractmethod
    def denoiser(self) -> EDMPrecond | FlowDenoiser:
        """The network as D(z, σ, class_label=None)."""

    def posterior_mean(
        self, z: Tensor, sigma: Tensor | float, class_label: Labels | None = None
    ) -> Tensor:
        """Return the denoised E[x | x + σε = z] for z (B, *shape) at sigma, (B,) or a number: (B, *shape), float32."""
        return self.denoiser(z, *self.checked(z, sigma, class_label))

    def guided_network(self, class_label: Tensor | None, guidance: float) -> Denoiser:
        """Return the preconditioned network as a function of (z, t), with classes (B,) or None, and guidance."""
        return guided(partial(self.network, class_label=class_label), self.network, guidance)

    def guidance_options(self) -> dict[str, Any]:
        """Return the options of guidance that are not the defaults."""
        options: dict[str, Any] = {} if self.guidance == 1 else {"guidance": self.guidance}
        return (
            options
            if self.drops_labels or not self.num_classes
            else {**options, "drops_labels": False}
        )


def check_positive(**options: float) -> None:
    """Raise InputError for the first option that is not a positive finite number."""
    for name, value in options.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise InputError(f"{name} must be finite and above 0, got {value!r:.80}")


def named_process(process: Process) -> dict[str, Any]:
    """Return the class and the arguments of a process; a user's own is named "own", because no file can make it."""
    if type(process) not in PROCESSES.values():
        return {"class": "own"}
    return {"class": type(process).__name__, **vars(process)}


def process_of(told: object) -> Process:
    """Make the process that a file names with its options; raise InputError for others."""
    name, given = named("process", told, PROCESSES)
    return PROCESSES[name](**given)


def named(option: str, told: object, known: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split {"class": …, …} into the name of a known class and its options."""
    name = str(told.get("class")) if isinstance(told, dict) else None
    if not isinstance(told, dict) or name not in known:
        raise InputError(
            f"{option} must name one of {', '.join(known)} as its class, got {told!r:.80}"
        )
    return name, {key: value for key, value in told.items() if key != "class"}
