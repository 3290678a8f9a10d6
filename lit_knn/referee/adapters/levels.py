"""Noise levels of the paper's process in the terms of DDPM: z' = √ᾱ·x + √(1−ᾱ)·ε, a variance-preserving process.

z = x + t·ε becomes z' = √ᾱ·z with ᾱ = 1/(1 + t²), because then √ᾱ·t = √(1−ᾱ). Code for DDPM reads ᾱ from a table of
its scheduler, for 1,000 timesteps. The scheduler here has a table of one entry, the level of the call, so no level is
rounded to a timestep.
"""

from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def alpha_bar(t: Tensor) -> Tensor:
    """ᾱ = 1/(1 + t²), the share of the variance of z' that x scales with; t is the noise level of z = x + t·ε."""
    return 1 / (1 + t.square())


def level_of(alpha_bar: Tensor) -> Tensor:
    """t = √((1−ᾱ)/ᾱ), the noise level of z'/√ᾱ."""
    return ((1 - alpha_bar) / alpha_bar).sqrt()


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


def ddpm_stand_ins() -> dict[str, ModuleType]:
    """Make modules that replace the packages of DDPM code which do not enter a posterior mean.

    `diffusers` gives the scheduler, `omegaconf` reads config files, `tqdm` draws progress bars.
    """
    return {
        "diffusers": _module("diffusers", DDIMScheduler=OneLevelScheduler),
        "omegaconf": _module("omegaconf", OmegaConf=None),
        "tqdm": _module("tqdm", tqdm=_without_a_bar),
    }


def by_level(z: Tensor, t: Tensor, rows: int, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Call `mean`, which takes latents of one noise level, for each level of a batch.

    Args:
        z: (B, *shape), latents.
        t: (B,), noise levels.
        rows: latents per call, at most.
        mean: (z (b, *shape), t scalar) -> (b, *shape).
    """
    result = torch.empty_like(z)
    for level in t.unique():
        for ids in (t == level).nonzero()[:, 0].split(rows):
            result[ids] = mean(z[ids], level).to(z.dtype)
    return result


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    # Libraries ask for the spec to learn whether a package is installed.
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


def _without_a_bar(iterable: Iterable[Any], **_: Any) -> Iterable[Any]:
    return iterable
