"""Measures how noisy the targets of a data set are, without a network.

The posteriors of noisy latents are enumerated, so what is measured is exact.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.common.progress import progress_bar
from lit_knn.common.settings import describe, fingerprint
from lit_knn.estimators import KNN, STF, Estimator, Exact, SubspaceKNN, Wiener
from lit_knn.metrics.enumeration import Columns
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.probe_level import LINEAR, Bound, measure_level, measure_sets
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of

# The estimators whose targets are compared. `Exact` leaves no noise, and is here for its time.
TARGETS: dict[str, type[Estimator]] = {
    "STF": STF,
    "KNN": KNN,
    "SubspaceKNN": SubspaceKNN,
    "Exact": Exact,
}

# At this noise level every posterior is uniform, so its variance is that of the data.
ALL_NOISE = 1e12


def measure_levels(
    latents: Sequence[NoisyLatents],
    by_class: bool,
    t: Sequence[float],
    folder: Path,
) -> Columns:
    """Measure the noise levels one by one. A finished level is kept in `folder`, and read from there.

    Args:
        latents: those of the images to train on, and perhaps those of held-out images.
        by_class: take each posterior over the images of the latent's class.
        t: noise levels.
        folder: where finished levels are kept.

    Returns:
        The columns of docs/probe.md, each (levels, latents). `variance` is that of the data about
        its mean image.

    Raises:
        InputError: the images (of each class) are all the same.
    """
    images = latents[0].reference
    sets = classes_of(images) if by_class else {0: images}
    linear = {LINEAR: bind_to_each(Wiener, sets)}
    targets: Bound = {}

    # No other level has the number len(t), so no other has the same draws.
    all_noise = measure_level(latents[0], by_class, linear, number=len(t), t=ALL_NOISE)
    variance = all_noise["irreducible"]
    if not variance.any():
        of_class = " of each class" if by_class else ""
        raise InputError(f"probe: the images{of_class} do not differ, so targets have no noise")

    finished = folder / settings_of(latents, sets, t)
    levels = []
    with progress_bar(len(t), "Probe", " levels") as bar:
        for number, level in enumerate(t):
            path = finished / f"{number}.npz"
            columns = load_tensors(path)

            if not columns:
                # They are bound only when needed, because their indexes take long to build.
                if not targets:
                    for name, make in TARGETS.items():
                        targets[name] = bind_to_each(make, sets)
                columns = measure_sets(latents, by_class, targets | linear, number=number, t=level)
                columns["variance"] = variance
                save_tensors(path, **columns)

            levels.append(columns)
            bar.update()

    table = {}
    for name in levels[0]:
        table[name] = torch.stack([columns[name] for columns in levels])
    return table


def bind_to_each(make: type[Estimator], sets: dict[int, ReferenceSet]) -> dict[int, Estimator]:
    """Make an estimator with default options for each class, and bind it to the class's images."""
    return {label: make().bind(images) for label, images in sets.items()}


def settings_of(
    latents: Sequence[NoisyLatents],
    sets: dict[int, ReferenceSet],
    t: Sequence[float],
) -> str:
    """Return a hash of everything that the measured levels depend on.

    Args:
        latents: latents of the images to train on, and perhaps of held-out images.
        sets: the images to train on, by class.
        t: noise levels.
    """
    images = latents[0].reference
    settings = [lit_knn.__version__, list(TARGETS), images.device.type, describe(images.index), t]

    for of_class in sets.values():
        settings.append(of_class.fingerprint())
    for drawn in latents:
        settings.append([drawn.seed, len(drawn.ids), drawn.reference.fingerprint()])
    return fingerprint(settings)
