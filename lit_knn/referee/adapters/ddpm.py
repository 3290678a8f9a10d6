"""Runs code for DDPM at the noise levels of the paper's process.

DDPM's z' = √ᾱ·x + √(1−ᾱ)·ε is √ᾱ·z with z = x + t·ε and ᾱ = 1/(1 + t²), because then √ᾱ·t = √(1−ᾱ). Its code reads ᾱ
from a table of its scheduler, with 1,000 timesteps between t = 0.01 and t = 157, in float32. The scheduler here has a
table of one entry, the level of the call, so no level is rounded to a timestep.
"""

from abc import abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_knn.estimators.counts import Count
from lit_knn.referee.adapters.adapter import Adapter, stand_in
from lit_knn.reference import ReferenceSet


def alpha_bar(t: Tensor) -> Tensor:
    """ᾱ = 1/(1 + t²), the share of the variance of z' that x scales with; t is the noise level of z = x + t·ε."""
    return 1 / (1 + t.square())


class OneLevelAdapter(Adapter):
    """Runs code that takes latents of one noise level in a call."""

    needs_square = True
    rows = Count(16)  # latents per call of the code

    @abstractmethod
    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        """Compute the posterior mean of z (b, *shape), float32, at one noise level, a float64 scalar."""

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        result = torch.empty_like(z)
        for level in t.unique():
            for ids in (t == level).nonzero()[:, 0].split(self.rows):
                result[ids] = self._mean_at(z[ids], level).to(z.dtype)
        return result


class OneLevelScheduler:
    """Replaces `diffusers.DDIMScheduler` in code that reads only ᾱ. Its timestep 0 has the level that was set."""

    def __init__(self, **_: Any) -> None:
        # (1,) float64: an element is a scalar, which does not change the type of float32 images.
        self.alphas_cumprod = torch.ones(1, dtype=torch.float64)

    def set_timesteps(self, num_steps: int) -> None:
        """Do nothing: no sampler runs here."""

    def set_level(self, t: Tensor) -> float:
        """Make the noise level t, a scalar, that of timestep 0. Returns the factor √ᾱ that turns z into z'."""
        self.alphas_cumprod = alpha_bar(t.double().cpu()).reshape(1)
        return self.alphas_cumprod.sqrt().item()


class Loader:
    """Batches of a reference set in model space, in order; with `labelled`, each comes with labels of 0."""

    def __init__(self, reference: ReferenceSet, rows: int, labelled: bool = False) -> None:
        self.reference, self.rows, self.labelled = reference, rows, labelled

    def __iter__(self) -> Iterator[Any]:
        for _, x in self.reference.chunks(self.rows):
            yield (x, torch.zeros(len(x))) if self.labelled else x


class DDPMAdapter(OneLevelAdapter):
    """Runs a denoiser of z' that takes its timestep from the scheduler of `diffusers`."""

    module: ClassVar[str]
    class_name: ClassVar[str]
    loader_batch = Count(512)  # images in a batch of its data loader
    # `omegaconf` reads config files, `tqdm` draws progress bars.
    stand_ins: ClassVar = {
        "diffusers": stand_in("diffusers", DDIMScheduler=OneLevelScheduler),
        "omegaconf": stand_in("omegaconf", OmegaConf=None),
        "tqdm": stand_in("tqdm", tqdm=lambda iterable, **_: iterable),
    }

    def _params(self) -> dict[str, Any]:
        """Return the options that are handed to the denoiser."""
        return {}

    def _make(self) -> Any:
        module = import_module(self.module)
        # The index and a copy of the images would be written only to be deleted.
        if hasattr(module, "save_optimal_index"):
            vars(module)["save_optimal_index"] = lambda *_: None
        channels, _, resolution = self.reference.shape
        loader = Loader(self.reference, self.loader_batch)
        data = SimpleNamespace(name="reference", dataloader=loader, resolution=resolution, in_channels=channels)
        # It writes what it computes from the images to files; they are thrown away.
        with TemporaryDirectory() as folder:
            params = {name: str(Path(folder) / "new") for name in ("index_path", "wiener_path")} | self._params()
            model = getattr(module, self.class_name)(data, str(self.reference.device), num_steps=1, params=params)
            model.train(data)
        return model

    def _mean_at(self, z: Tensor, level: Tensor) -> Tensor:
        scale = self.theirs.scheduler.set_level(level)
        return self.theirs.denoise(scale * z, torch.tensor(0))
