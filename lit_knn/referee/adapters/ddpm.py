"""Runs code for DDPM at the noise levels of the paper's process.

DDPM's z' = √ᾱ·x + √(1−ᾱ)·ε is √ᾱ·z with z = x + t·ε and ᾱ = 1/(1 + t²), because then √ᾱ·t = √(1−ᾱ). Its code reads ᾱ
from a table of its scheduler, with 1,000 timesteps between t = 0.01 and t = 157, in float32. The scheduler here has a
table of one entry, the level of the call, so no level is rounded to a timestep.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lit_knn.referee.adapters.adapter import Adapter
from lit_knn.reference import ReferenceSet

LATENTS = 16


def alpha_bar(t: Tensor) -> Tensor:
    """ᾱ = 1/(1 + t²), the share of the variance of z' that x scales with; t is the noise level of z = x + t·ε."""
    return 1 / (1 + t.square())


class OneLevelAdapter(Adapter):
    """Runs code that takes latents of one noise level in a call."""

    needs_square = True

    rows = LATENTS
    """Latents per call of the code."""

    @abstractmethod
    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        """Compute the posterior mean of z (b, *shape), float32, at one noise level, a float64 scalar."""

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        result = torch.empty_like(z)
        for level in t.unique():
            for ids in (t == level).nonzero()[:, 0].split(self.rows):
                result[ids] = self._mean_at(z[ids], level).to(z.dtype)
        return result


class DDPMAdapter(OneLevelAdapter):
    """Runs a denoiser of z' that takes its timestep from the scheduler of `diffusers`."""

    def _stand_ins(self) -> Mapping[str, ModuleType]:
        # `omegaconf` reads config files, `tqdm` draws progress bars.
        return {
            "diffusers": _module("diffusers", DDIMScheduler=OneLevelScheduler),
            "omegaconf": _module("omegaconf", OmegaConf=None),
            "tqdm": _module("tqdm", tqdm=_without_a_bar),
        }

    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        scale = self.theirs.scheduler.set_level(level)
        return self.theirs.denoise(scale * z, torch.tensor(0))


class OneLevelScheduler:
    """Replaces `diffusers.DDIMScheduler` in code that reads only ᾱ: timestep 0 has exactly the level that is set.

    Attributes:
        alphas_cumprod: (1,) float64, ᾱ of the level. As a scalar it does not change the type of float32 images.
    """

    def __init__(self, **_: Any) -> None:
        self.alphas_cumprod = torch.ones(1, dtype=torch.float64)

    def set_timesteps(self, num_steps: int) -> None:
        """Do nothing: no sampler runs here."""

    def set_level(self, t: Tensor) -> float:
        """Make the noise level t, a scalar, that of timestep 0. Returns the factor √ᾱ that turns z into z'."""
        self.alphas_cumprod = alpha_bar(t.double().cpu()).reshape(1)
        return self.alphas_cumprod.sqrt().item()


class Loader:
    """Batches of a reference set in model space, in order, as a PyTorch data loader without shuffling gives them."""

    def __init__(self, reference: ReferenceSet, rows: int) -> None:
        self.reference, self.rows = reference, rows

    def __iter__(self) -> Iterator[Any]:
        for _, x in self.reference.chunks(self.rows):
            yield x


def bundle(reference: ReferenceSet, rows: int) -> SimpleNamespace:
    """Describe a reference set as these projects describe a data set; `rows` is the batch size of its loader."""
    channels, _, resolution = reference.shape
    loader = Loader(reference, rows)
    return SimpleNamespace(name="reference", dataloader=loader, resolution=resolution, in_channels=channels)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    # Libraries ask for the spec to learn whether a package is installed.
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


def _without_a_bar(iterable: Iterable[Any], **_: Any) -> Iterable[Any]:
    return iterable
