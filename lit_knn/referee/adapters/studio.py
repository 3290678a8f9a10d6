"""The `optimal` denoiser of Analytic Diffusion Studio (github.com/analytic-diffusion/analytic-diffusion-studio).

It is code for DDPM. DDPM's z' = √ᾱ·x + √(1−ᾱ)·ε is √ᾱ·z with z = x + t·ε and ᾱ = 1/(1 + t²), because then
√ᾱ·t = √(1−ᾱ). Its code reads ᾱ from a table of its scheduler, with 1,000 timesteps between t = 0.01 and t = 157, in
float32. The scheduler here has a table of one entry, the level of the call, so no level is rounded to a timestep.
"""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_knn.estimators.counts import Count, of_images
from lit_knn.referee.adapters.adapter import Adapter, Origin, stand_in

LOADER_BATCH = 512


class OneLevelScheduler:
    """Replaces `diffusers.DDIMScheduler` in code that reads only ᾱ. Its timestep 0 has the level that was set."""

    def __init__(self, **_: Any) -> None:
        # (1,) float64: an element is a scalar, which does not change the type of float32 images.
        self.alphas_cumprod = torch.ones(1, dtype=torch.float64)

    def set_timesteps(self, num_steps: int) -> None:
        """Do nothing: no sampler runs here."""

    def set_level(self, t: Tensor) -> float:
        """Make the noise level t, a scalar, that of timestep 0. Returns the factor √ᾱ that turns z into z'."""
        self.alphas_cumprod = (1 / (1 + t.double().cpu().square())).reshape(1)
        return self.alphas_cumprod.sqrt().item()


class StudioOptimal(Adapter):
    """The Studio's `optimal`, for square images. Its code needs FAISS and torchvision.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        num_neighbors: images averaged per z; null for their 2000, or N if that is less.
        rows: latents per call of its code, which holds an array (rows, num_neighbors, d) in float32; null for 16.
    """

    origin = Origin(
        "https://github.com/analytic-diffusion/analytic-diffusion-studio",
        "79aec54097c0664056057165166d71aa920249b4",
        "src",
    )
    referee_note = (
        "Softmax over the num_neighbors nearest images alone (2,000 by default), with FAISS's float32 distances as "
        "likelihoods: the rest of the set has weight 0, so it is biased where the posterior is wide."
    )
    deterministic = True
    num_neighbors = Count(2000, of_images)
    rows = Count(16)
    # `omegaconf` reads config files, `tqdm` draws progress bars.
    stand_ins: ClassVar = {
        "diffusers": stand_in("diffusers", DDIMScheduler=OneLevelScheduler),
        "omegaconf": stand_in("omegaconf", OmegaConf=None),
        "tqdm": stand_in("tqdm", tqdm=lambda iterable, **_: iterable),
    }

    def __init__(self, checkout: str, num_neighbors: int | None = None, rows: int | None = None) -> None:
        super().__init__(checkout)
        self.num_neighbors, self.rows = num_neighbors, rows

    def _make(self) -> Any:
        module = import_module("local_diffusion.models.optimal")
        # The index and a copy of the images would be written only to be deleted.
        if hasattr(module, "save_optimal_index"):
            vars(module)["save_optimal_index"] = lambda *_: None
        channels, _, resolution = self.reference.shape
        loader = [x for _, x in self.reference.chunks(LOADER_BATCH)]
        data = SimpleNamespace(name="reference", dataloader=loader, resolution=resolution, in_channels=channels)
        # It writes what it computes from the images to files; they are thrown away.
        with TemporaryDirectory() as folder:
            params = {"index_path": str(Path(folder) / "new"), "num_neighbors": self.num_neighbors}
            model = module.OptimalDenoiser(data, str(self.reference.device), num_steps=1, params=params)
            model.train(data)
        return model

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        """Call the code for the latents of one noise level at a time."""
        result = torch.empty_like(z)
        for level in t.unique():
            scale = self.theirs.scheduler.set_level(level)
            for ids in (t == level).nonzero()[:, 0].split(self.rows):
                result[ids] = self.theirs.denoise(scale * z[ids], torch.tensor(0)).to(z.dtype)
        return result
