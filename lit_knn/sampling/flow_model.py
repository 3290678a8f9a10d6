"""Flow models: a velocity, whose flow maps noise to an image."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError
from lit_knn.nets.flow import OUTPUTS, FlowDenoiser, FlowNetwork
from lit_knn.sampling.denoising_model import DenoisingModel
from lit_knn.sampling.described_parts import class_and_options, named_process, process_of
from lit_knn.sampling.flow_times import FixedSteps, TimeSpan
from lit_knn.sampling.samplers import seeded_noise
from lit_knn.sampling.solvers import euler_step, heun_step
from lit_knn.theory.noise import LinearInterpolant, Process

# A file can name only these solvers.
SOLVERS = {solver.__name__: solver for solver in (euler_step, heun_step)}


class FlowModel(DenoisingModel):
    """A flow model: a sampler integrates its velocity from noise to an image (Lipman et al. 2022).

    `num_steps`, `sampling_class`, `guidance` and `drops_labels` are those of `GenerativeModel`.

    Args:
        network: the flow network.
        image_shape: shape of one image.
        times: the range of times.
        sampler: integrates the velocity; `FixedSteps()` by default.
    """

    kind = "flow"
    network: FlowNetwork

    def __init__(
        self,
        network: FlowNetwork,
        image_shape: Sequence[int],
        times: TimeSpan,
        sampler: FixedSteps | None = None,
        num_steps: int = 50,
        sampling_class: int | None = None,
        guidance: float = 1.0,
        drops_labels: bool = True,
    ) -> None:
        super().__init__(
            network,
            image_shape,
            num_steps=num_steps,
            sampling_class=sampling_class,
            guidance=guidance,
            drops_labels=drops_labels,
        )
        check_flow_process(network.process, times)
        self.times = times
        self.sampler = FixedSteps() if sampler is None else sampler
        self.check_steps(num_steps)

    @classmethod
    def around(
        cls,
        net: nn.Module,
        image_shape: Sequence[int],
        output: object = None,
        times: Mapping[str, float] | None = None,
        sampler: object = None,
        process: object = None,
        **options: Any,
    ) -> "FlowModel":
        """Make the model from the parts that a file names.

        Args:
            net: the raw network.
            image_shape: shape of one image.
            output: class and options of the flow network.
            times: arguments of the `TimeSpan`.
            sampler: class and solver of the sampler.
            process: see `process_of`; None for the straight path.
            options: those of the constructor.
        """
        name, output_options = class_and_options("output", output, OUTPUTS)
        network = OUTPUTS[name](net, **output_options)
        if process is not None:
            network.process = process_of(process)

        _, sampler_options = class_and_options("sampler", sampler, {"FixedSteps": FixedSteps})
        fixed_steps = FixedSteps(SOLVERS[sampler_options["solver"]])
        return cls(network, image_shape, TimeSpan(**(times or {})), fixed_steps, **options)

    def options(self) -> dict[str, object]:
        """Return the settings; a user's own class or solver becomes None, as no file can name it."""
        options: dict[str, object] = {
            "output": self._named_output(),
            "times": {"low": self.times.low, "high": self.times.high},
            "sampler": self._named_sampler(),
            "num_steps": self.num_steps,
            "sampling_class": self.sampling_class,
        }
        process = self.network.process
        if type(process) is not LinearInterpolant:
            options["process"] = named_process(process)
        return options | self.guidance_options()

    def _named_output(self) -> dict[str, object] | None:
        """Return class and options of the flow network, or None if no file can name it."""
        if type(self.network) not in OUTPUTS.values():
            return None

        output: dict[str, object] = {"class": type(self.network).__name__}
        for name, value in self.network.description().items():
            if name not in ("output", "process"):
                output[name] = value
        return output

    def _named_sampler(self) -> dict[str, object] | None:
        """Return class and solver of the sampler, or None if no file can name the class."""
        if type(self.sampler) is not FixedSteps:
            return None

        for name, solver in SOLVERS.items():
            if solver is self.sampler.solver:
                return {"class": "FixedSteps", "solver": name}
        return {"class": "FixedSteps", "solver": None}

    def times_range(self) -> tuple[float, float]:
        highest = 1.0
        # The largest number below 1: the straight path has the noise level τ/(1 − τ), which is infinite at 1.
        if type(self.network.process) is LinearInterpolant:
            highest = math.nextafter(1.0, 0.0)
        return 0.0, highest

    @property
    def denoiser(self) -> FlowDenoiser:
        return FlowDenoiser(self.network)

    def draw(
        self, seeds: Sequence[int] | Tensor, num_steps: int, labels: Tensor | None, guidance: float
    ) -> Tensor:
        noise = seeded_noise(seeds, self.image_shape, device=self.device)
        velocity = self.guided_network(labels, guidance)
        return self.sampler(
            velocity, noise, self.times, num_steps=num_steps, process=self.network.process
        )


def check_flow_process(process: Process, times: TimeSpan) -> None:
    """Raise InputError if a flow cannot use this process.

    Its noise level at the start, `times.high`, must exceed 1. Processes whose times are noise
    levels, such as EDM's, are therefore refused.
    """
    ends = torch.tensor([times.low, times.high], dtype=torch.float64)
    low, high = process.sigma(ends).tolist()
    scales_are_positive = bool((process.scale(ends) > 0).all())

    if not (0 < low < high < math.inf and high > 1 and scales_are_positive):
        levels = f"the noise levels {low:g} to {high:g}"
        span = f"the times {times.low:g} to {times.high:g}"
        raise InputError(
            f"process={type(process).__name__} has {levels} at {span}, "
            "but a flow begins above 1: use LinearInterpolant or VP"
        )
