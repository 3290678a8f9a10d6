"""Denoisers of Analytic Diffusion Studio (github.com/analytic-diffusion/analytic-diffusion-studio)."""

from importlib import import_module
from typing import Any, ClassVar

from lit_knn.estimators.counts import Count, of_images
from lit_knn.referee.adapters.checkout import Origin
from lit_knn.referee.adapters.ddpm import DDPMAdapter

REPOSITORY = "https://github.com/analytic-diffusion/analytic-diffusion-studio"
LOADER_BATCH = 512


class _Studio(DDPMAdapter):
    """A denoiser of the Studio. It writes what it computes from the images to files; they are thrown away."""

    origin = Origin(REPOSITORY, "79aec54097c0664056057165166d71aa920249b4", "src")
    model: ClassVar[str]
    class_name: ClassVar[str]
    deterministic = True
    loader_batch = Count(LOADER_BATCH)
    params: ClassVar[tuple[str, ...]] = ()  # options that are handed to it

    def _make(self) -> Any:
        module = import_module(f"local_diffusion.models.{self.model}")
        # The index and a copy of the images would be written only to be deleted.
        if hasattr(module, "save_optimal_index"):
            vars(module)["save_optimal_index"] = lambda *_: None
        params = {name: getattr(self, name) for name in self.params}
        return self._trained(getattr(module, self.class_name), self.loader_batch, ["index_path", "wiener_path"], params)


class StudioOptimal(_Studio):
    """The Studio's `optimal`. It needs FAISS and torchvision.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        num_neighbors: images averaged per z; null for their 2000, or N if that is less.
        rows: latents per call of its code, which holds an array (rows, num_neighbors, d) in float32; null for 16.
    """

    referee_note = (
        "Softmax over the num_neighbors nearest images alone (2,000 by default), with FAISS's float32 distances as "
        "likelihoods: the rest of the set has weight 0, so it is biased where the posterior is wide."
    )
    model, class_name, params = "optimal", "OptimalDenoiser", ("num_neighbors",)
    num_neighbors = Count(2000, of_images)

    def __init__(self, checkout: str, num_neighbors: int | None = None, rows: int | None = None) -> None:
        super().__init__(checkout)
        self.num_neighbors, self.rows = num_neighbors, rows


class StudioWiener(_Studio):
    """The Studio's `wiener`. It needs FAISS and torchvision.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
    """

    referee_note = (
        "The Wiener filter with the full covariance of the images (divided by N − 1) in float32, with two products of "
        "d × d matrices per call; it is not a posterior mean over the images."
    )
    model, class_name = "wiener", "DenoisingWiener"
    rows = Count(2**62)


class StudioPCALocality(_Studio):
    """The Studio's `pca_locality`, its authors' own model. It needs FAISS and torchvision.

    It holds four arrays (rows, loader_batch, d) in float32, and costs O(N·d²) per z.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        loader_batch: batch size of its data loader, which the result depends on; null for the 512 of its configuration
            for CIFAR-10.
        mask_threshold: share of the mask's largest entry below which entries are 0; their default is 0.02, and 0.05
            for CIFAR-10. At 0 the mask stays as it is.
        rows: latents per call of its code; null for 16.
    """

    referee_note = (
        "Per pixel, a softmax of distances in a neighbourhood of correlated pixels, averaged over the batches of the "
        "data loader with equal weights: with one image per batch it is the data mean at every t."
    )
    model, class_name, params = "pca_locality", "PCALocalityDenoiser", ("mask_threshold",)

    def __init__(
        self, checkout: str, loader_batch: int | None = None, mask_threshold: float = 0.02, rows: int | None = None
    ) -> None:
        super().__init__(checkout)
        self.loader_batch, self.mask_threshold, self.rows = loader_batch, mask_threshold, rows
