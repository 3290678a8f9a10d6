"""Statistics of a real set on disk, under a name that tells data and extractor."""

import hashlib
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_knn.metrics.fidelity import FeatureStatistics

CHUNK = 4096


def data_fingerprint(images: Tensor, hflip: bool) -> str:
    """SHA-256 of images (N, *shape) as they are stored, and of whether their mirror images count, too."""
    digest = hashlib.sha256(f"{tuple(images.shape)} {images.dtype} hflip={hflip}".encode())
    for start in range(0, len(images), CHUNK):
        digest.update(images[start : start + CHUNK].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def cache_path(folder: str | Path, metric: str, data: str, extractor: str, with_features: bool) -> Path:
    """Where the statistics of the data with this fingerprint belong, by the extractor with that one."""
    name = hashlib.sha256(f"{data} {extractor} features={with_features}".encode()).hexdigest()[:16]
    return Path(folder) / f"{metric}-{name}.npz"


def save_statistics(path: Path, statistics: FeatureStatistics) -> None:
    """Write a file at once or not at all; whatever was there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"mean": statistics.mean, "cov": statistics.cov, "count": torch.tensor(statistics.count)}
    if statistics.features is not None:
        arrays["features"] = statistics.features
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.savez(file, **{name: array.cpu().numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    os.replace(file.name, path)


def load_statistics(path: Path, num_features: int) -> FeatureStatistics | None:
    """Read what `save_statistics` wrote; None if the file is damaged or is something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        statistics = FeatureStatistics(
            arrays["mean"], arrays["cov"], int(arrays["count"]), features=arrays.get("features")
        )
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
    fits = statistics.mean.shape == (num_features,) and statistics.cov.shape == (num_features, num_features)
    return statistics if fits else None
