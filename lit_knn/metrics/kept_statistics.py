"""Statistics of the features of a data set in a file, so that later runs need no pass over the data."""

import hashlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lit_knn.common.distributed import broadcast, on_first_rank, rank_and_size
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


def kept_or_computed(
    path: Path,
    compute: Callable[[], FeatureStatistics],
    device: torch.device | str,
    metric: str,
) -> FeatureStatistics | None:
    """Load statistics, or compute and keep them. All ranks must call it; only the first needs the result.

    Args:
        path: see `statistics_path`.
        compute: called on all ranks if the file is absent or damaged.
        device: where the result goes.
        metric: name of the distance, for a message.
    """
    is_first = rank_and_size()[0] == 0
    earlier = load_statistics(path) if is_first else None
    if broadcast(earlier is not None):
        return None if earlier is None else earlier.to(device)

    # If the folder cannot be made, the error comes before the pass over the data.
    on_first_rank(partial(path.parent.mkdir, parents=True, exist_ok=True))
    statistics = compute()
    if is_first:
        save_statistics(path, statistics, metric)
    return statistics


def load_statistics(path: Path) -> FeatureStatistics | None:
    """Read the statistics that an earlier run has kept; None if there are none."""
    parts = load_tensors(path)
    if not parts:
        return None
    count = int(parts["count"])
    return FeatureStatistics(parts["mean"], parts["cov"], count, parts.get("features"))


def save_statistics(path: Path, statistics: FeatureStatistics, metric: str) -> None:
    """Keep the statistics of a data set, and say where; only warn if that fails.

    Args:
        path: see `statistics_path`.
        statistics: of the data.
        metric: name of the distance, for the message.
    """
    parts = vars(statistics) | {"count": torch.tensor(statistics.count)}
    try:
        save_tensors(path, **parts)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        warnings.warn(f"{reason}; going on without", stacklevel=3)
        return
    print(f"Statistics of the data ({metric}) are kept in {path}", file=sys.stderr)
