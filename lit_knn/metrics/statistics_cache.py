"""Keep statistics of a real set on disk, under a name that identifies data and extractor."""

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from lit_knn.atomic_files import written_whole
from lit_knn.metrics.fidelity import FeatureStatistics


def cache_path(folder: str | Path, metric: str, data: str, extractor: str, with_features: bool) -> Path:
    """Return the path of the statistics; `data` and `extractor` are fingerprints."""
    name = hashlib.sha256(f"{data} {extractor} features={with_features}".encode()).hexdigest()[:16]
    return Path(folder) / f"{metric}-{name}.npz"


def save_statistics(path: Path, statistics: FeatureStatistics) -> None:
    """Write the file completely or not at all; an existing file is replaced."""
    arrays = {"mean": statistics.mean, "cov": statistics.cov, "count": torch.tensor(statistics.count)}
    if statistics.features is not None:
        arrays["features"] = statistics.features
    with written_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, **{name: array.cpu().numpy() for name, array in arrays.items()})  # type: ignore[arg-type]


def load_statistics(path: Path, num_features: int) -> FeatureStatistics | None:
    """Read a file of `save_statistics`; return None if the file is damaged or holds other data."""
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
