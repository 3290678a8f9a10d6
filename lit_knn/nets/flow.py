"""Flow networks turn the output of a raw network (a velocity or the data) into a velocity.

The process is flow matching's straight path, z = (1 − τ)x + τε (`LinearInterpolant`), with noise level σ = τ/(1 − τ),
or another process with times between 0 and 1. The velocity v = E[dz/dτ | z] is a linear function of z and of
E[x|z]; on the straight path it is E[ε − x | z].
"""

from abc import abstractmethod
from contextlib import nullcontext
from numbers import Real

import torch
from torch import Tensor, nn

from lit_knn.nets.base import labels_for, tensor_of_net
from lit_knn.nets.precond import EDMPrecond
from lit_knn.theory.noise import LINEAR_PROCESS, LinearInterpolant, Process, per_item


class FlowNetwork(nn.Module):
    """v_θ(z, τ): turns the output of a raw network into the velocity E[dz/dτ | z]. Subclasses say what the output is.

    The network gets z unscaled, and the noise label of an EDM network, ln(σ)/4, so any network of `lit_knn.nets`
    can be used. The label is finite for 0 < τ < 1.

    Args:
        model: any module `model(z_scaled, noise_label, class_label=None)`. To use augmentation labels, it must take
            `augment_label` too.
    """

    process: Process = LINEAR_PROCESS
    """The noise process. The code that makes the network may set another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        z: Tensor,
        tau: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z (B, *shape) at tau (B,) or () to the velocity, (B, *shape) float32."""
        z = z.float()
        tau = per_item(tau, z).flatten().double().expand(len(z))
        class_label = labels_for(self.model, class_label, z)
        # A network without augmentation labels need not take a second label.
        labels: tuple[Tensor | None, ...] = (class_label,)
        if augment_label is not None:
            labels = (class_label, augment_label)
        return self.velocity(z, tau, labels).to(torch.float32)

    @abstractmethod
    def velocity(self, z: Tensor, tau: Tensor, labels: tuple[Tensor | None, ...]) -> Tensor:
        """Map z (B, *shape) float32 at tau (B,) float64 to the velocity, (B, *shape) of any float type.

        `labels` are those that the raw network gets: the class label and perhaps the augmentation label.
        """

    def output(self, z: Tensor, tau: Tensor, labels: tuple[Tensor | None, ...]) -> Tensor:
        """Return the raw network's output, (B, *shape) float32."""
        noise_label = self.process.sigma(tau).log().float() / 4
        output = tensor_of_net(self.model, self.model(z, noise_label, *labels))
        return output.to(torch.float32)

    def denoised(self, z: Tensor, tau: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Return the posterior mean E[x|z], (B, *shape) float32; on the straight path it is z − τv."""
        velocity = self(z, tau, class_label)
        mean = self.process.mean_of_velocity(z.float(), per_item(tau, z).double(), velocity)
        return mean.to(torch.float32)

    def description(self) -> dict[str, object]:
        """Describe the parameterisation by plain values, for checkpoints."""
        description: dict[str, object] = {"output": type(self).__name__}
        if type(self.process) is LinearInterpolant:
            return description

        process: dict[str, object] = {"class": type(self.process).__name__}
        # The process may be a user's own class, with values of any type.
        for name, value in vars(self.process).items():
            if isinstance(value, str):
                process[name] = value
            elif isinstance(value, Real):
                # Readers of checkpoints accept numbers only as float.
                process[name] = float(value)
        description["process"] = process
        return description


class VelocityOutput(FlowNetwork):
    """The network's output is the velocity itself, as in flow matching (Lipman et al. 2022, arXiv 2210.02747)."""

    def velocity(self, z: Tensor, tau: Tensor, labels: tuple[Tensor | None, ...]) -> Tensor:
        return self.output(z, tau, labels)


class DataOutput(FlowNetwork):
    """The network's output is x̂ = E[x|z], so v = (z − x̂)/τ on the straight path.

    The division multiplies an error of x̂ by 1/τ. So train it at times from about 0.05 on: `UniformTimes(low=0.05)`.
    Li & He 2025, arXiv 2511.13720, divide by no less.
    """

    def velocity(self, z: Tensor, tau: Tensor, labels: tuple[Tensor | None, ...]) -> Tensor:
        return self.process.velocity(z, per_item(tau, z), self.output(z, tau, labels))


class EDMOutput(FlowNetwork):
    """An EDM denoiser as a flow network: v follows from x̂ = D(z/s, σ), where D is EDM's preconditioned network.

    With this class, EDM's network can be trained as a flow, and a trained EDM network can sample on the straight path.

    Args:
        model: see `FlowNetwork`; its input is scaled to unit variance.
        sigma_data: standard deviation of the data, above 0.
    """

    def __init__(self, model: nn.Module, sigma_data: float = 0.5) -> None:
        super().__init__(model)
        self.sigma_data = float(sigma_data)

    def velocity(self, z: Tensor, tau: Tensor, labels: tuple[Tensor | None, ...]) -> Tensor:
        y = z / per_item(self.process.scale(tau), z).float()
        sigma = self.process.sigma(tau)
        denoised = EDMPrecond(self.model, self.sigma_data)(y, sigma, *labels)
        return self.process.velocity(z, per_item(tau, z), denoised)

    def description(self) -> dict[str, object]:
        return {**super().description(), "sigma_data": self.sigma_data}


class FlowDenoiser(nn.Module):
    """The denoiser D(z, σ) = E[x | x + σε = z] of a flow network, by one evaluation at s·z and the time of σ.

    Args:
        flow: the flow network.
    """

    fp16 = False  # whether it runs under autocast to float16
    drops_labels = True  # whether its training hid some class labels

    def __init__(self, flow: FlowNetwork) -> None:
        super().__init__()
        self.flow = flow

    @property
    def model(self) -> nn.Module:
        """The raw network."""
        return self.flow.model

    def forward(self, z: Tensor, sigma: Tensor, class_label: Tensor | None = None) -> Tensor:
        """Map z (B, *shape) of the EDM process at sigma (B,) or () to the denoised (B, *shape), float32."""
        process = self.flow.process
        levels = per_item(sigma, z).flatten().double().expand(len(z))
        tau = process.t_of_sigma(levels)
        scaled = per_item(process.scale(tau), z).float() * z

        with torch.autocast(z.device.type, torch.float16) if self.fp16 else nullcontext():
            return self.flow.denoised(scaled, tau, class_label)


# A checkpoint can name only these parameterisations.
OUTPUTS: dict[str, type[FlowNetwork]] = {
    kind.__name__: kind for kind in (VelocityOutput, DataOutput, EDMOutput)
}
