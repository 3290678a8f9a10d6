"""The analytic denoiser GoldDiff, github.com/shangxinyi/GoldDiff.

Their code needs the packages diffusers and omegaconf.
"""

from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.others.checkout import OthersEstimator

# Their code holds up to N/10 images for each latent of a call, several times.
LATENTS = 8


class GoldDiff(OthersEstimator):
    """Their `OursDenoiser`, with the settings of their config for CIFAR-10.

    Its mean differs from the posterior mean by design, as that of `PCALocality`: each pixel has a
    posterior of its own, over the pixels that the data relate to it.
    """

    project, module, name = "shangxinyi/GoldDiff", "methods.ours", "OursDenoiser"

    def make(self, their_class: Any) -> Any:
        N, (channels, _, width) = self.reference.N, self.reference.shape
        images = self.reference.take(torch.arange(N))
        form = {"resolution": width, "in_channels": channels}
        data = SimpleNamespace(name="images", dataloader=images.split(256), **form)
        settings = {"k_min": N // 20, "k_max": N // 10, "low_res_dim": 16, "mask_threshold": 0.03}

        # They write the covariance of the data into a folder and read it again.
        with TemporaryDirectory() as folder:
            params = {**settings, "wiener_path": folder}
            return their_class(data, "cpu", 10, params=params).train(data)

    def mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        # Their process shrinks images as it adds noise: z = sqrt(a) x + sqrt(1 - a) noise. Step 0
        # of their scheduler stands for the noise level of z.
        a = 1 / (1 + t[0] ** 2)
        self.theirs.scheduler.alphas_cumprod[0] = a
        means = [self.theirs.denoise(part, 0) for part in (a.sqrt() * z).split(LATENTS)]

        return torch.cat(means)
