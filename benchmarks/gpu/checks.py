"""Checks every path on a device against float64 on the CPU, before anything is timed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Rows, markdown
from benchmarks.gpu.images import synthetic_images
from benchmarks.gpu.timing import why
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Estimator,
    Exact,
    MonteCarlo,
    SubspaceKNN,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import Index, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet

LEVELS = (0.02, 0.5, 2.0, 5.0, 20.0, 80.0)
LATENTS_PER_LEVEL = 32
CLASSES = 10
# The squared error of a mean that counts as exact, per dimension.
EXACT = 1e-9
# A sampling estimator draws other numbers on another device. Its squared error, over all latents of a level, may
# differ from the CPU's by this factor.
FACTOR = 2.0
# Errors below this number count as equal.
NO_ERROR = 1e-12
LEAST_RECALL = 0.9


@dataclass(frozen=True)
class Check:
    """One check: the estimator of a set of N images, its index, and what the set has.

    Attributes:
        make: makes the estimator, given N.
        index: makes the index, if the estimator searches.
        exact: whether the estimator must agree with enumeration; others must agree with themselves on the CPU.
        hflip: whether mirrored images belong to the set.
        floats: whether the images are floats, not pixels.
        labels: whether the set has classes.
    """

    make: Callable[[int], Estimator]
    index: Callable[[], Index] | None = None
    exact: bool = False
    hflip: bool = False
    floats: bool = False
    labels: bool = False


def _checks() -> dict[str, Check]:
    return {
        "Exact": Check(lambda N: Exact(), exact=True),
        "Exact, mirrored images": Check(lambda N: Exact(), hflip=True, exact=True),
        "Exact, float images": Check(lambda N: Exact(), floats=True, exact=True),
        "Exact, by class": Check(lambda N: ByClass(Exact()), labels=True, exact=True),
        "SubspaceKNN, n = N": Check(lambda N: SubspaceKNN(64, n=N), exact=True),
        "STF": Check(lambda N: STF()),
        "UniformSNIS": Check(lambda N: UniformSNIS()),
        "MonteCarlo": Check(lambda N: MonteCarlo()),
        "KNN, TorchIndex": Check(lambda N: KNN(k=N // 4), TorchIndex),
        "KNN, mirrored images": Check(lambda N: KNN(k=N // 4), TorchIndex, hflip=True),
        "KNN, float images": Check(lambda N: KNN(k=N // 4), TorchIndex, floats=True),
        "KNN, by class": Check(lambda N: ByClass(KNN(k=N // CLASSES)), TorchIndex, labels=True),
        "KNN, SubspaceIndex": Check(lambda N: KNN(k=N // 4), lambda: SubspaceIndex(32)),
        "SubspaceKNN": Check(lambda N: SubspaceKNN(64, n=N // 8)),
        "Wiener": Check(lambda N: Wiener(64)),
    }


def measure(N: int, shape: tuple[int, int, int], device: torch.device) -> Rows:
    """Check every path; one row each, with `passed`, `measured` and `limit`. TF32 is allowed during all checks."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        images = synthetic_images(N, shape, torch.device("cpu"))
        rows = [
            {"path": name} | outcome(check, images, device) for name, check in _checks().items()
        ]
        recall = _tried(lambda: _recall(TorchIndex(), images, device))
        return [*rows, {"path": "TorchIndex, recall of the 64 nearest"} | recall]
    finally:
        torch.set_float32_matmul_precision(before)


def outcome(check: Check, images: Tensor, device: torch.device) -> dict[str, Any]:
    """Do one check on images (N, C, H, W), uint8. Returns `passed`, `measured` and `limit`."""
    return _tried(lambda: _error(check, images, device))


def _tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # Compilers, libraries and drivers raise errors of many types.
        return {"passed": False, "measured": why(error), "limit": ""}


def _error(check: Check, images: Tensor, device: torch.device) -> dict[str, Any]:
    """Compare an estimator with enumeration. One that draws images is also compared with itself on the CPU."""
    N = len(images)
    labels = torch.arange(N) % CLASSES if check.labels else None
    values = images.float() / 127.5 - 1 if check.floats else images
    here = ReferenceSet(values, check.index and check.index(), labels=labels, hflip=check.hflip)
    there = ReferenceSet(
        values.to(device), check.index and check.index(), labels=labels, hflip=check.hflip
    )
    estimator = check.make(N)
    on_cpu, on_device = copy.deepcopy(estimator).bind(here), copy.deepcopy(estimator).bind(there)
    worst, limit = 0.0, EXACT if check.exact else FACTOR
    for number, t in enumerate(LEVELS):
        z, x, own = _latents(here, t, number)
        truth = _truth(here, z, t, own)
        mse = _mse(on_device, truth, z.to(device), t, x.to(device), own)
        if check.exact:
            worst = max(worst, mse)
        else:
            other = _mse(on_cpu, truth, z, t, x, own)
            both_none = max(mse, other) < NO_ERROR
            worst = max(worst, 1.0 if both_none else max(mse, NO_ERROR) / max(other, NO_ERROR))
    what = "squared error" if check.exact else "of the CPU's squared error"
    return {"passed": worst <= limit, "measured": f"{worst:.2g} {what}", "limit": f"{limit:g}"}


def _latents(
    reference: ReferenceSet, t: float, number: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make latents at noise level t, their sources and labels, on the CPU."""
    generator = keyed_generator("cpu", number)
    ids = torch.randint(reference.N, (LATENTS_PER_LEVEL,), generator=generator)
    x = reference.take(ids)
    z = x + t * torch.randn(x.shape, generator=generator)
    return z, x, None if reference.labels is None else reference.labels[ids]


def _truth(reference: ReferenceSet, z: Tensor, t: float, labels: Tensor | None) -> Tensor:
    """Enumerate the posterior mean in float64 on the CPU. With labels, use only the images of each latent's class."""
    x = reference.take(torch.arange(reference.N)).double()
    sq_dist = _sq_dist(z, x)
    if labels is not None and reference.labels is not None:
        sq_dist.masked_fill_(labels.unsqueeze(1) != reference.labels, torch.inf)
    weights = torch.softmax(sq_dist / (-2 * t * t), dim=1)
    return (weights @ x.flatten(1)).view(z.shape)


def _sq_dist(z: Tensor, x: Tensor) -> Tensor:
    """Sum squared differences in float64."""
    both = z.double().flatten(1), x.flatten(1)
    return torch.cdist(*both, compute_mode="donot_use_mm_for_euclid_dist").square()


def _mse(
    estimator: Estimator, truth: Tensor, z: Tensor, t: float, x: Tensor, labels: Tensor | None
) -> float:
    """Return the mean squared error per dimension."""
    labels = None if labels is None else labels.to(z.device)
    mean = estimator.posterior_mean(
        z, t, x_source=x, generator=keyed_generator(z.device, 1), labels=labels
    )
    return (mean.cpu().double() - truth).square().mean().item()


def _recall(index: Index, images: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the share of the true nearest images that an index finds."""
    here, there = ReferenceSet(images), ReferenceSet(images.to(device), index)
    z, _, _ = _latents(here, 5.0, 0)
    x = here.take(torch.arange(here.N)).double()
    sq_dist = _sq_dist(z, x)
    true = sq_dist.topk(64, dim=1, largest=False).indices
    _, found = there.search(z.to(device), 64)
    share = sum(
        torch.isin(a, b).float().mean().item() for a, b in zip(true, found.cpu(), strict=True)
    ) / len(true)
    return {
        "passed": share >= LEAST_RECALL,
        "measured": f"{share:.3f}",
        "limit": f"at least {LEAST_RECALL}",
    }


def table(rows: Rows) -> str:
    """Make a Markdown table."""
    lines = [["path", "measured", "limit", "passed"]]
    lines += [
        [row["path"], row["measured"], row["limit"], "yes" if row["passed"] else "**no**"]
        for row in rows
    ]
    return markdown(lines)
