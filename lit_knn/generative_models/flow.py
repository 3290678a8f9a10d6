"""Flow models: a velocity, whose flow maps noise to an image."""

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.errors import InputError
from lit_knn.flow_sampling import AdaptiveSteps, FixedSteps, FlowSampler, TimeSpan, Velocity
from lit_knn.generative_models.base import GenerativeModel, check_numbers, is_known, named, without
from lit_knn.generative_models.processes import named_process, process_of
from lit_knn.nets.flow import OUTPUTS, FlowDenoiser, FlowNetwork
from lit_knn.sampling import seeded_noise
from lit_knn.solvers import euler_step, heun_step
from lit_knn.theory.noise import LinearInterpolant, Process

# A file can name these samplers and solvers alone.
SAMPLERS: dict[str, type[FlowSampler]] = {sampler.__name__: sampler for sampler in (FixedSteps, AdaptiveSteps)}
SOLVERS = {solver.__name__: solver for solver in (euler_step, heun_step)}


class FlowModel(GenerativeModel):
    """A flow model: a sampler integrates its velocity from noise to an image (Lipman et al. 2022).

    Args:
        network: the flow network.
        image_shape: shape of one image.
        times: the range of times.
        sampler: integrates the velocity; `FixedSteps` by default.
        num_steps: see `GenerativeModel`; None for a sampler that chooses its own steps.
        sampling_class: see `GenerativeModel`.
        guidance: see `GenerativeModel`.
        drops_labels: see `GenerativeModel`.
    """

    kind = "flow"
    network: FlowNetwork

    def __init__(
        self,
        network: FlowNetwork,
        image_shape: Sequence[int],
        times: TimeSpan,
        sampler: FlowSampler | None = None,
        num_steps: int | None = 50,
        sampling_class: int | None = None,
        guidance: float = 1.0,
        drops_labels: bool = True,
    ) -> None:
        super().__init__(network, image_shape, num_steps, sampling_class, guidance, drops_labels)
        check_flow_process(network.process, times)
        self.times = times
        self.sampler = FixedSteps() if sampler is None else sampler
        check_steps(self.sampler, times, num_steps)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        output: object = None,
        times: object = None,
        sampler: object = None,
        process: object = None,
        **options: Any,
    ) -> "FlowModel":
        """See `GenerativeModel.around`. `output`, `times`, `sampler` and `process` are named with their options.

        A file that names no process has the straight path.
        """
        name, given = named("output", output, OUTPUTS)
        network = OUTPUTS[name](net, **given)
        if process is not None:
            network.process = process_of(process)
        name, given = named("sampler", sampler, SAMPLERS)
        solver = given.get("solver", "heun_step")
        if not isinstance(solver, str) or solver not in SOLVERS:
            raise InputError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r:.80}")
        _check_numbers_of(SAMPLERS[name], without(given, "solver"))
        made = SAMPLERS[name](**{**given, **({"solver": SOLVERS[solver]} if "solver" in given else {})})
        if not isinstance(times, dict) or times.keys() != {"low", "high"}:
            raise InputError(f"times must be a dict of low and high, got {times!r:.80}")
        check_numbers(**times)
        return cls(network, image_shape, TimeSpan(**times), made, **options)

    def options(self) -> dict[str, Any]:
        """See `GenerativeModel.options`. A user's own class is None, because no file can name it."""
        own = without(without(self.network.description(), "output"), "process")
        process = self.network.process
        return {
            "output": {"class": type(self.network).__name__, **own} if is_known(self.network, OUTPUTS) else None,
            "times": {"low": self.times.low, "high": self.times.high},
            "sampler": _sampler_options(self.sampler) if is_known(self.sampler, SAMPLERS) else None,
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
            **({} if type(process) is LinearInterpolant else {"process": named_process(process)}),
            **self.guidance_options(),
        }

    @property
    def net(self) -> nn.Module:
        """The raw network inside the flow network."""
        return self.network.model

    def posterior_mean(self, z: Tensor, sigma: Tensor | float, class_label: Tensor | None = None) -> Tensor:
        """Return the denoised E[x | x + σε = z] for z (B, *shape) at sigma, (B,) or a number: (B, *shape), float32."""
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device=z.device)
        return FlowDenoiser(self.network)(z, sigma, class_label)

    def check_steps(self, num_steps: int | None) -> None:
        """See `GenerativeModel.check_steps`."""
        check_steps(self.sampler, self.times, num_steps)

    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int | None, class_label: Tensor | None, guidance: float
    ) -> Tensor:
        """See `GenerativeModel.draw`."""
        self.check_steps(num_steps)

        def start(chosen: Sequence[int] | Tensor) -> tuple[Tensor, Velocity]:
            noise = seeded_noise(chosen, self.image_shape, device=self.device)
            labels = class_label if chosen is seeds else self.labels(chosen, None)
            return noise, self.guided_network(labels, guidance)

        return self.sampler(start, seeds, self.times, num_steps, self.network.process)


def check_flow_process(process: Process, times: TimeSpan) -> None:
    """Raise InputError if a flow cannot have this process: at `times.high`, where it begins, noise must outweigh x.

    So processes whose times are noise levels, such as EDM's, do not fit.
    """
    ends = torch.tensor([times.low, times.high], dtype=torch.float64)
    (low, high), scale = process.sigma(ends).tolist(), process.scale(ends)
    if not (0 < low < high < math.inf and high > 1) or not (scale > 0).all():
        raise InputError(
            f"process={type(process).__name__} has the noise levels {low:g} to {high:g} at the times {times.low:g} to "
            f"{times.high:g}, but a flow begins above 1: use LinearInterpolant or VP"
        )


def check_steps(sampler: FlowSampler, times: TimeSpan, num_steps: int | None, option: str = "num_steps") -> None:
    """Raise InputError if the sampler cannot take this number of steps; None is for one that chooses its own."""
    name = type(sampler).__name__
    if sampler.chooses_steps:
        if num_steps is not None:
            raise InputError(f"{option}={num_steps}, but {name} chooses its steps: set it to null")
    elif num_steps is None:
        raise InputError(f"{option} is null, but {name} needs a number of steps")
    else:
        times.descending(num_steps)


def _sampler_options(sampler: FlowSampler) -> dict[str, Any]:
    """Return the class and the arguments of the sampler's constructor, which it keeps under their names."""
    options = {name: getattr(sampler, name) for name in signature(type(sampler)).parameters}
    if "solver" in options:
        options["solver"] = next((name for name, solver in SOLVERS.items() if solver is options["solver"]), None)
    return {"class": type(sampler).__name__, **options}


def _check_numbers_of(sampler: type[FlowSampler], given: dict[str, Any]) -> None:
    check_numbers(**given)
    known = signature(sampler).parameters
    for option, value in given.items():
        if option in known and isinstance(known[option].default, int) and type(value) is not int:
            raise InputError(f"{option} must be an integer, got {value!r:.80}")
