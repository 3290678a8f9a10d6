"""Statistics of the features of a data set in a file, so that later runs need no pass over the data."""

import hashlib
import sys
import warnings
from pathlib import Path

import torch

from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.metrics.kept_results import load_tensors, save_tensors


def statistics_path(
    folder: str, data: str, extractor: FeatureExtractor, with_features: bool
) -> Path:
    """Return the file of the statistics of a data set.

    Args:
        folder: where such files are kept.
        data: fingerprint of the images.
        extractor: computes the features.
        with_features: whether the file also has the features of each image.
    """
    identity = f"{data} {extractor.fingerprint()} features={with_features}".encode()
    name = f"{extractor.metric}-{hashlib.sha256(identity).hexdigest()[:16]}.npz"
    return Path(folder, name).expanduser()


def load_statistics(path: Path) -> FeatureStatistics | None:
    """Read the statistics that an earlier run has kept; None if there are none."""
    parts = load_tensors(path)
    if not parts:
        return None
    count = int(parts["count"])
    return FeatureStatistics(parts["mean"], parts["cov"], count, parts.get("features"))


def save_statistics(path: Path, statistics: FeatureStatistics, metric: str) -> None:
    """Keep the statistics of a data set, and say where; only warn if that fails."""
    parts = vars(statistics) | {"count": torch.tensor(statistics.count)}
    try:
        save_tensors(path, **parts)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        warnings.warn(f"{reason}; going on without", stacklevel=3)
        return
    print(f"Statistics of the data ({metric}) are kept in {path}", file=sys.stderr)
