"""Denoisers of Analytic Diffusion Studio (github.com/analytic-diffusion/analytic-diffusion-studio)."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from lit_knn.estimators.counts import Count, check_count, of_images
from lit_knn.referee.adapters.checkout import Load, Origin
from lit_knn.referee.adapters.ddpm import LATENTS, DDPMAdapter, bundle

REPOSITORY = "https://github.com/analytic-diffusion/analytic-diffusion-studio"
LOADER_BATCH = 512


class _Studio(DDPMAdapter):
    """A denoiser of the Studio. It writes what it computes from the images to files; they are thrown away."""

    origin = Origin(REPOSITORY, "79aec54097c0664056057165166d71aa920249b4", "src")
    model: ClassVar[str]
    class_name: ClassVar[str]
    deterministic = True
    loader_batch = LOADER_BATCH

    def _params(self) -> dict[str, Any]:
        return {}

    def _make(self, load: Load) -> Any:
        module = load(f"local_diffusion.models.{self.model}")
        data = bundle(self.reference, self.loader_batch)
        with TemporaryDirectory() as folder:
            paths = {name: str(Path(folder) / "new") for name in ("index_path", "wiener_path")}
            made = getattr(module, self.class_name)
            model = made(data, str(self.reference.device), num_steps=1, params={**paths, **self._params()})
            # The index and a copy of the images would be written only to be deleted.
            if hasattr(module, "save_optimal_index"):
                vars(module)["save_optimal_index"] = lambda *_: None
            model.train(data)
        return model


class StudioOptimal(_Studio):
    """The Studio's `optimal`. It needs FAISS and torchvision.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        num_neighbors: images averaged per z; null for their 2000, or N if that is less.
        rows: latents per call of its code, which holds an array (rows, num_neighbors, d) in float32.
    """

    referee_note = (
        "Softmax over the num_neighbors nearest images alone (2,000 by default), with FAISS's float32 distances as "
        "likelihoods: the rest of the set has weight 0, so it is biased where the posterior is wide."
    )
    model, class_name = "optimal", "OptimalDenoiser"
    num_neighbors = Count(2000, of_images)

    def __init__(self, checkout: str, num_neighbors: int | None = None, rows: int = LATENTS) -> None:
        super().__init__(checkout)
        self.num_neighbors = num_neighbors
        self.rows = check_count(type(self).__name__, "rows", rows)

    def _params(self) -> dict[str, Any]:
        return {"num_neighbors": self.num_neighbors}


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
    rows = 2**62


class StudioPCALocality(_Studio):
    """The Studio's `pca_locality`, its authors' own model. It needs FAISS and torchvision.

    It holds four arrays (rows, loader_batch, d) in float32, and costs O(N·d²) per z.

    Args:
        checkout: folder of a checkout of Analytic Diffusion Studio.
        loader_batch: batch size of its data loader, which the result depends on; null for the 512 of its configuration
            for CIFAR-10.
        mask_threshold: share of the mask's largest entry below which entries are 0; their default is 0.02, and 0.05
            for CIFAR-10. At 0 the mask stays as it is.
        rows: latents per call of its code.
    """

    referee_note = (
        "Per pixel, a softmax of distances in a neighbourhood of correlated pixels, averaged over the batches of the "
        "data loader with equal weights: with one image per batch it is the data mean at every t."
    )
    model, class_name = "pca_locality", "PCALocalityDenoiser"

    def __init__(
        self, checkout: str, loader_batch: int | None = None, mask_threshold: float = 0.02, rows: int = LATENTS
    ) -> None:
        super().__init__(checkout)
        name = type(self).__name__
        given = LOADER_BATCH if loader_batch is None else loader_batch
        self.loader_batch = check_count(name, "loader_batch", given)
        self.mask_threshold = mask_threshold
        self.rows = check_count(name, "rows", rows)

    def _params(self) -> dict[str, Any]:
        return {"mask_threshold": self.mask_threshold}
