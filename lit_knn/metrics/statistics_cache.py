"""Keeps tensors in files, such as the statistics of a real set under a name that identifies data and extractor."""

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.files import written_whole
from lit_knn.metrics.fidelity import FeatureStatistics


def cache_path(folder: str | Path, metric: str, data: str, extractor: str, with_features: bool) -> Path:
    """Return the path of the statistics; `data` and `extractor` are fingerprints."""
    name = hashlib.sha256(f"{data} {extractor} features={with_features}".encode()).hexdigest()[:16]
    return Path(folder) / f"{metric}-{name}.npz"


def save_statistics(path: Path, statistics: FeatureStatistics) -> None:
    """Write statistics without their logits, by `save_tensors`."""
    save_tensors(path, **{**vars(statistics), "count": torch.tensor(statistics.count), "logits": None})


def load_statistics(path: Path, num_features: int) -> FeatureStatistics | None:
    """Read a file of `save_statistics`; return None if it is absent or damaged, or holds other data."""
    found = load_tensors(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items() if name != "features"}
    if shapes != {"mean": (num_features,), "cov": (num_features, num_features), "count": ()}:
        return None
    return FeatureStatistics(found["mean"], found["cov"], int(found["count"]), found.get("features"))


def save_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Write tensors to an npz file completely or not at all; an existing file is replaced. None is left out."""
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
    with written_whole(path) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of `save_tensors`; return no tensors if it is absent or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error):
        return {}
