"""Denoisers of Analytic Diffusion Studio, and the one of GoldDiff (github.com/shangxinyi/GoldDiff), which has its form.

The Studio is github.com/analytic-diffusion/analytic-diffusion-studio. All need torchvision, the Studio's FAISS as well.
"""

from typing import Any

from lit_knn.estimators.counts import Count, of_images
from lit_knn.referee.adapters.adapter import Origin
from lit_knn.referee.adapters.ddpm import DDPMAdapter

STUDIO = Origin(
    "https://github.com/analytic-diffusion/analytic-diffusion-studio", "79aec54097c0664056057165166d71aa920249b4", "src"
)
# GoldDiff's configurations for CIFAR-10 and MNIST set k_min = N/20 and k_max = N/10.
MIN_SHARE, MAX_SHARE = 20, 10


class StudioOptimal(DDPMAdapter):
    """The Studio's `optimal`.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        num_neighbors: images averaged per z; null for their 2000, or N if that is less.
        rows: latents per call of its code, which holds an array (rows, num_neighbors, d) in float32; null for 16.
    """

    origin, module, class_name = STUDIO, "local_diffusion.models.optimal", "OptimalDenoiser"
    referee_note = (
        "Softmax over the num_neighbors nearest images alone (2,000 by default), with FAISS's float32 distances as "
        "likelihoods: the rest of the set has weight 0, so it is biased where the posterior is wide."
    )
    deterministic = True
    num_neighbors = Count(2000, of_images)

    def __init__(self, checkout: str, num_neighbors: int | None = None, rows: int | None = None) -> None:
        super().__init__(checkout)
        self.num_neighbors, self.rows = num_neighbors, rows

    def _params(self) -> dict[str, Any]:
        return {"num_neighbors": self.num_neighbors}


class StudioWiener(DDPMAdapter):
    """The Studio's `wiener`."""

    origin, module, class_name = STUDIO, "local_diffusion.models.wiener", "DenoisingWiener"
    referee_note = (
        "The Wiener filter with the full covariance of the images (divided by N − 1) in float32, with two products of "
        "d × d matrices per call; it is not a posterior mean over the images."
    )
    deterministic = True
    rows = Count(2**62)


class StudioPCALocality(DDPMAdapter):
    """The Studio's `pca_locality`, its authors' own model.

    It holds four arrays (rows, loader_batch, d) in float32, and costs O(N·d²) per z.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        loader_batch: batch size of its data loader, which the result depends on; null for the 512 of its configuration
            for CIFAR-10.
        mask_threshold: share of the mask's largest entry below which entries are 0; their default is 0.02, and 0.05
            for CIFAR-10. At 0 the mask stays as it is.
        rows: latents per call of its code; null for 16.
    """

    origin, module, class_name = STUDIO, "local_diffusion.models.pca_locality", "PCALocalityDenoiser"
    referee_note = (
        "Per pixel, a softmax of distances in a neighbourhood of correlated pixels, averaged over the batches of the "
        "data loader with equal weights: with one image per batch it is the data mean at every t."
    )
    deterministic = True

    def __init__(
        self, checkout: str, loader_batch: int | None = None, mask_threshold: float = 0.02, rows: int | None = None
    ) -> None:
        super().__init__(checkout)
        self.loader_batch, self.mask_threshold, self.rows = loader_batch, mask_threshold, rows

    def _params(self) -> dict[str, Any]:
        return {"mask_threshold": self.mask_threshold}


class GoldDiff(DDPMAdapter):
    """The denoiser `ours` of GoldDiff.

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
    module, class_name = "methods.ours", "OursDenoiser"
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

    def _params(self) -> dict[str, Any]:
        return {
            "k_min": self.k_min or max(self.reference.N // MIN_SHARE, 1),
            "k_max": self.k_max or max(self.reference.N // MAX_SHARE, 1),
            "low_res_dim": self.low_res_dim,
            "mask_threshold": self.mask_threshold,
        }
