"""Denoisers of Analytic Diffusion Studio (github.com/analytic-diffusion/analytic-diffusion-studio)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_knn.estimators.counts import Count, check_count, of_images
from lit_knn.referee.adapters.adapter import Adapter, check_square
from lit_knn.referee.adapters.checkout import Load, Origin
from lit_knn.referee.adapters.levels import by_level, ddpm_stand_ins
from lit_knn.reference import ReferenceSet

_MODELS = "src/local_diffusion/models"
ORIGIN = Origin(
    "https://github.com/analytic-diffusion/analytic-diffusion-studio",
    "79aec54097c0664056057165166d71aa920249b4",
    {
        f"{_MODELS}/base.py": "0c6e67d144b2dcd289898bc3aa879b974f8efaf2c5a267768943548721ff5ed0",
        f"{_MODELS}/optimal.py": "8ebbdffeb56546270decb8ff19fdb85af266735af6699a7ad89e6e95c09621aa",
        f"{_MODELS}/wiener.py": "2da3dc29b88bf62ab7c8e73e9bf7f26f8624f3bf6af0af547be1f894cab21f72",
        f"{_MODELS}/pca_locality.py": "3d9272f24b8958fca629728cd4cca850fffb64a4a0434287b9ae0f5a0e5ba510",
        "src/local_diffusion/utils/wiener.py": "38e6410d55ec68b7ea64ce27ab1d6639487250eb8fe5ea9a3ce00a03979158e5",
    },
    "src",
)
LOADER_BATCH = 512
LATENTS = 16


class Loader:
    """Batches of a reference set in model space, in order, as a PyTorch data loader without shuffling gives them."""

    def __init__(self, reference: ReferenceSet, rows: int) -> None:
        self.reference, self.rows = reference, rows

    def __iter__(self) -> Iterator[Tensor]:
        for _, x in self.reference.chunks(self.rows):
            yield x


def bundle(reference: ReferenceSet, rows: int) -> SimpleNamespace:
    """Describe a reference set as these projects describe a data set; `rows` is the batch size of its loader."""
    channels, _, resolution = reference.shape
    loader = Loader(reference, rows)
    return SimpleNamespace(name="reference", dataloader=loader, resolution=resolution, in_channels=channels)


class DDPMAdapter(Adapter):
    """Runs a denoiser of z' = √ᾱ·z that takes one timestep per call, at the exact noise level of each z.

    The code is given a scheduler that holds ᾱ of the level in float64 (`OneLevelScheduler`). With its own scheduler it
    would know 1,000 levels between 0.01 and 157, in float32.
    """

    rows = LATENTS
    """Latents per call of the code."""

    def _stand_ins(self) -> Mapping[str, ModuleType]:
        return ddpm_stand_ins()

    def _posterior_mean(
        self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        model = self.theirs

        def mean(z: Tensor, level: Tensor) -> Tensor:
            scale = model.scheduler.set_level(level)
            return model.denoise(scale * z.float(), torch.tensor(0))

        with self._running(generator):
            return by_level(z, t.flatten(), self.rows, mean)


class _Studio(DDPMAdapter):
    """A denoiser of the Studio. It writes what it computes from the images to files; they are thrown away."""

    origin = ORIGIN
    model: ClassVar[str]
    class_name: ClassVar[str]
    deterministic = True

    loader_batch = LOADER_BATCH

    def _params(self) -> dict[str, Any]:
        return {}

    def _make(self, load: Load) -> Any:
        check_square(self)
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
