"""The denoiser of GoldDiff (github.com/shangxinyi/GoldDiff)."""

from importlib import import_module
from typing import Any

from lit_knn.referee.adapters.checkout import Origin
from lit_knn.referee.adapters.ddpm import DDPMAdapter

# Its configurations for CIFAR-10 and MNIST set k_min = N/20 and k_max = N/10.
MIN_SHARE, MAX_SHARE = 20, 10
LOADER_BATCH = 512


class GoldDiff(DDPMAdapter):
    """The denoiser `ours` of GoldDiff. It needs torchvision.

    It holds arrays (rows, k_max, d) in float32, and costs O(k·d²) per z.

    Args:
        checkout: folder of a checkout of shangxinyi/GoldDiff.
        k_min: images averaged at small t; null for N/20, as in its configurations.
        k_max: images averaged at large t, and found by the coarse search; null for N/10.
        low_res_dim: side of the small images of the coarse search; 0 for half of the images' side.
        mask_threshold: see `StudioPCALocality`; 0.03 for CIFAR-10.
        rows: latents per call of its code; null for 16.
    """

    origin = Origin("https://github.com/shangxinyi/GoldDiff", "4c0ba1dcff74f84b4c6d8ead2c3ebc812bbfc786")
    referee_note = (
        "Per pixel, a softmax over k images of distances in a neighbourhood of correlated pixels; the k are the "
        "nearest of a random subset of the images, which at large t has only k_max of them; the rest has weight 0."
    )

    def __init__(
        self,
        checkout: str,
        k_min: int | None = None,
        k_max: int | None = None,
        low_res_dim: int = 0,
        mask_threshold: float = 0.02,
        rows: int | None = None,
    ) -> None:
        super().__init__(checkout)
        self.k_min, self.k_max, self.low_res_dim = k_min, k_max, low_res_dim
        self.mask_threshold, self.rows = mask_threshold, rows

    def _make(self) -> Any:
        params = {
            "k_min": self.k_min or max(self.reference.N // MIN_SHARE, 1),
            "k_max": self.k_max or max(self.reference.N // MAX_SHARE, 1),
            "low_res_dim": self.low_res_dim,
            "mask_threshold": self.mask_threshold,
        }
        return self._trained(import_module("methods.ours").OursDenoiser, LOADER_BATCH, ["wiener_path"], params)
