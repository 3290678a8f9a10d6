"""Time, memory and roofline of every estimator on a device: rows and their table."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import Rows, ThreeLines, markdown, number
from benchmarks.gpu import roofline
from benchmarks.gpu.roofline import Phase, Roofline, Sizes
from benchmarks.gpu.timing import measured, peak_mib, release, why
from lit_knn.common.deferred_checks import DeferredChecks
from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import (
    KNN,
    STF,
    ByClass,
    Estimator,
    Exact,
    MonteCarlo,
    OneSample,
    SubspaceKNN,
    UniformSNIS,
)
from lit_knn.index import FaissIndex, Index, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import heun_step

# All images matter at this noise level, so that no estimator takes a short cut.
NOISE_LEVEL = 10.0
# Calls of the estimator in a training step of iCT, by solver. The paper's runs with STF and KNN take Heun's.
CALLS = {"Euler": 1, "Heun": 2}
# FAISS builds larger indexes on the host for minutes, and they leave no memory for others.
FAISS_BYTES = 4e9


def _faiss(s: Sizes) -> Index:
    if (size := 4 * s.N * s.d) > FAISS_BYTES:
        raise InputError(f"an index of {size / 1e9:.0f} GB, which the host would build for minutes")
    return FaissIndex("Flat")


@dataclass(frozen=True)
class Measured:
    """An estimator to measure.

    Attributes:
        make: makes it.
        work: its least work.
        index: makes its index, if it searches.
        eager: whether nothing is compiled.
        by_class: whether each latent has a class.
        step: whether Heun's step is measured, which calls it twice.
    """

    make: Callable[[Sizes], Estimator]
    work: Callable[[Sizes], Sequence[Phase]]
    index: Callable[[Sizes], Index] | None = None
    eager: bool = False
    by_class: bool = False
    step: bool = False


ENTRIES = {
    "OneSample": Measured(lambda s: OneSample(), roofline.one_sample),
    "STF": Measured(lambda s: STF(s.n), roofline.gathered),
    "UniformSNIS": Measured(lambda s: UniformSNIS(s.n), roofline.gathered),
    "KNN, TorchIndex": Measured(lambda s: KNN(s.k, s.n), roofline.knn, lambda s: TorchIndex()),
    "KNN, Heun's step": Measured(
        lambda s: KNN(s.k, s.n), lambda s: 2 * roofline.knn(s), lambda s: TorchIndex(), step=True
    ),
    "KNN, SubspaceIndex": Measured(
        lambda s: KNN(s.k, s.n), roofline.knn_in_components, lambda s: SubspaceIndex(min(s.r, 256))
    ),
    # Without the compiler, PyTorch gathers the drawn images before it reads them.
    "KNN, gathered": Measured(
        lambda s: KNN(s.k, s.n), roofline.knn, lambda s: TorchIndex(), eager=True
    ),
    "KNN, by class": Measured(
        lambda s: ByClass(KNN(min(s.k, 512), s.n)),
        roofline.knn_by_class,
        lambda s: TorchIndex(),
        by_class=True,
    ),
    "KNN, FAISS Flat": Measured(lambda s: KNN(s.k, s.n), roofline.knn, _faiss),
    "SubspaceKNN": Measured(lambda s: SubspaceKNN(s.r, s.n), roofline.subspace_knn),
    "MonteCarlo": Measured(lambda s: MonteCarlo(s.n), roofline.monte_carlo),
    "Exact": Measured(lambda s: Exact(), roofline.exact),
    "three lines of PyTorch": Measured(lambda s: ThreeLines(), roofline.exact),
}


def measure(
    sizes: Sequence[Sizes],
    images: Tensor,
    rates: Roofline,
    seconds: float,
    time_is_left: Callable[[], bool],
) -> Rows:
    """Measure each estimator on images (N, C, H, W), with one index for all sizes, which differ in B alone.

    A row has `ms`, its ratio to the roofline, `host_ms` and `peak_mib`; or `note` says why not.
    """
    rows: Rows = []
    for name, entry in ENTRIES.items():
        bound: Estimator | None = None
        for own in sizes:
            calls = CALLS["Heun"] if entry.step else 1
            row = {
                "estimator": name,
                **own._asdict(),
                "calls": calls,
                "least_ms": rates.least_ms(entry.work(own)),
            }
            row["note"] = "" if time_is_left() else "no time left"
            if not row["note"]:
                try:
                    bound = _bound(entry, own, images) if bound is None else bound
                    row |= _measured(entry, bound, own, seconds)
                    row["of_roofline"] = row["ms"] / row["least_ms"]
                except (
                    Exception
                ) as error:  # Compilers, libraries and drivers raise errors of many types.
                    row["note"] = why(error)
            rows.append(row)
        del bound
        release(images.device)
    return rows


def _bound(entry: Measured, sizes: Sizes, images: Tensor) -> Estimator:
    classes = max(sizes.N // roofline.IMAGES_OF_A_CLASS, 1)
    labels = torch.arange(sizes.N) * classes // sizes.N if entry.by_class else None
    reference = ReferenceSet(
        images, None if entry.index is None else entry.index(sizes), labels=labels
    )
    return entry.make(sizes).bind(reference)


def _measured(
    entry: Measured, estimator: Estimator, sizes: Sizes, seconds: float
) -> dict[str, float]:
    """Measure a call as a training step makes it, which checks its loss alone."""
    reference = estimator.reference
    device = reference.device
    generator = keyed_generator(device, 0)
    ids = torch.randint(sizes.N, (sizes.B,), generator=keyed_generator("cpu", 1))
    labels = None if reference.labels is None else reference.labels[ids]
    x = reference.take(ids.to(device))
    z = x + NOISE_LEVEL * torch.randn(x.shape, device=device, generator=generator)

    def mean(z: Tensor, t: Tensor | float) -> Tensor:
        return estimator.posterior_mean(z, t, x, generator, labels)

    def call() -> Tensor:
        return (
            heun_step(z, NOISE_LEVEL, NOISE_LEVEL / 2, mean) if entry.step else mean(z, NOISE_LEVEL)
        )

    stance = torch.compiler.set_stance("force_eager" if entry.eager else "default")
    with stance, DeferredChecks().collect(0):
        return {**measured(call, device, seconds)._asdict(), "peak_mib": peak_mib(call, device)}


def table(rows: Rows, step_ms: Callable[[int, int], float]) -> str:
    """Make a Markdown table. `step_ms` gives iCT's time of a step of B images of d values without an estimator."""
    if not rows:
        return ""
    shares = [f"share of a step of {name}" for name in CALLS]
    lines = [
        [
            "estimator",
            "images",
            "B",
            "ms",
            "host, ms",
            "roofline, ms",
            "ratio",
            *shares,
            "memory, MiB",
        ]
    ]
    for row in rows:
        start, least = (
            [row["estimator"], f"{row['N']:,} x {row['d']:,}", str(row["B"])],
            f"{row['least_ms']:.3g}",
        )
        if "ms" in row:
            step, call = step_ms(row["B"], row["d"]), row["ms"] / row["calls"]
            lines.append([
                *start, f"{row['ms']:.3g}", f"{row['host_ms']:.3g}", least, f"{row['of_roofline']:.2f}",
                *("" if math.isnan(step) else f"{n * call / (n * call + step):.1%}" for n in CALLS.values()),
                number(row["peak_mib"]),
            ])  # fmt: skip
        else:
            lines.append([*start, row["note"], "", least, "", "", "", ""])
    return f"k = {rows[0]['k']}, n = {rows[0]['n']}, t = {NOISE_LEVEL:g}:\n\n{markdown(lines)}"
