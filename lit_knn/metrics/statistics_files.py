"""Published statistics of features, `mu` and `sigma`, in the files of pytorch-fid, EDM and guided-diffusion."""

import hashlib
import os
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import torch

from lit_knn.common.errors import InputError, first_line, printable, reading
from lit_knn.metrics.feature_statistics import FeatureStatistics

MEAN, COVARIANCE = "mu", "sigma"
# Some programs compute a covariance in float32. Its errors are below this share of the largest value.
ROUNDING = 1e-3
# guided-diffusion also has statistics of spatial features, and the images of its reference batch.
UNUSED = ("mu_s", "sigma_s", "arr_0")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address of the web."""
    return os.fspath(path).startswith(("http://", "https://"))


def is_statistics_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names statistics, and no images: an .npz file that has them, a pickle or an address.

    A file that cannot be read is none; whoever reads it as images then says what is wrong.
    """
    suffix = Path(os.fspath(path)).suffix.lower()
    if suffix == ".pkl" or is_url(path):
        return True
    if suffix != ".npz":
        return False

    try:
        with np.load(Path(path).expanduser(), allow_pickle=False) as file:
            return MEAN in file.files and COVARIANCE in file.files
    except Exception:  # Damaged files raise errors of many types.
        return False


def read_statistics_file(path: str | os.PathLike[str]) -> tuple[FeatureStatistics, list[str]]:
    """Read published statistics. Their number of images is not known: `count` is 0.

    Args:
        path: an .npz file with `mu` (F,) and `sigma` (F, F), or its address, from which it is downloaded
            once.

    Returns:
        The statistics, and the names of known arrays in the file that are not used.
    """
    name = printable(os.fspath(path))
    if Path(urlparse(os.fspath(path)).path).suffix.lower() == ".pkl":
        rule = "is a pickle, which may run any code when it is read"
        command = 'numpy.savez("stats.npz", **pickle.load(open("stats.pkl", "rb"))["fid"])'
        raise InputError(f"{name} {rule}: if you trust it, convert it once with {command}")

    file = _downloaded(os.fspath(path)) if is_url(path) else Path(path).expanduser()
    with reading(name, " as statistics"), np.load(file, allow_pickle=False) as arrays:
        lacking = {MEAN, COVARIANCE}.difference(arrays.files)
        if lacking:
            held = ", ".join(map(printable, arrays.files))
            raise InputError(f"{name} has no arrays mu and sigma, but {held}")
        mean, cov = (np.asarray(arrays[key], np.float64) for key in (MEAN, COVARIANCE))
        unused = [key for key in UNUSED if key in arrays.files]

    if mean.ndim != 1 or len(mean) == 0 or cov.shape != (len(mean), len(mean)):
        shapes = f"got {mean.shape} and {cov.shape}"
        raise InputError(f"{name}: mu must be (F,) and sigma (F, F), {shapes}")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise InputError(f"{name}: mu or sigma is not finite")
    _check_covariance(name, cov)
    return FeatureStatistics(torch.from_numpy(mean), torch.from_numpy(cov), 0), unused


def _check_covariance(name: str, cov: np.ndarray) -> None:
    """Raise InputError unless a matrix is symmetric and has no negative eigenvalue, but for rounding errors."""
    size = np.abs(cov).max()
    if np.abs(cov - cov.T).max() > ROUNDING * size:
        raise InputError(f"{name}: sigma is no covariance, because it is not symmetric")

    least = np.linalg.eigvalsh(cov)[0]
    if least < -ROUNDING * size:
        problem = f"it has the negative eigenvalue {least:.3g}"
        raise InputError(f"{name}: sigma is no covariance, because {problem}")


def _downloaded(address: str) -> Path:
    """Return the path of the file of an address in PyTorch's download folder, downloaded if missing."""
    # Different files have the same name, such as cifar10-32x32.npz, so the address is in the path.
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    name = Path(urlparse(address).path).name or "statistics"
    path = Path(torch.hub.get_dir()) / "statistics" / digest / name
    if path.is_file():
        return path

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(address, str(path), progress=False)
    except OSError as error:
        advice = f"put that file at {path}, or give its path here"
        raise InputError(
            f"{address} could not be downloaded ({first_line(error)}); {advice}"
        ) from error
    return path
