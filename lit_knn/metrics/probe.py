"""Measures how noisy the targets of a data set are, from exact posteriors of noisy latents, without a network."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.settings import describe, fingerprint
from lit_knn.estimators import KNN, STF, Estimator, SubspaceKNN, Wiener
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import TIME, repeated_errors
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of, rows_by_label
from lit_knn.reference.reference_set import chunk_rows
from lit_knn.reference.streaming import all_sq_dist
from lit_knn.theory.posterior import log_posterior

TARGETS = {"STF": STF, "KNN": KNN, "SubspaceKNN": SubspaceKNN}
# A posterior is collapsed if one image has more than this share of it.
COLLAPSED = 0.99
# Estimates at each latent. Latents differ more than estimates at one latent, so more repeats would gain little.
REPEATS = 2
# Latents at a time, and bytes of their probabilities. Each batch converts all images twice, so batches are large.
BATCH_SIZE, POSTERIOR_BYTES = 256, 128 * 2**20
Columns = dict[str, Tensor]  # by the names of docs/probe.md
Bound = dict[str, dict[int, Estimator]]  # bound estimators by name and class


def measure(latents: Sequence[NoisyLatents], by_class: bool, t: Sequence[float], folder: Path) -> Columns:
    """Measure the levels t one by one, and keep each in `folder`; return columns of docs/probe.md, (levels, latents).

    The first `latents` are those of the images to train on, and the second, if any, those of images held out. By class,
    posteriors are over the images of the latent's class. `variance` is that of the data, from its mean image.
    """
    images, levels = latents[0].reference, []
    sets = classes_of(images) if by_class else {0: images}
    linear: Bound = {"wiener": {label: Wiener().bind(own) for label, own in sets.items()}}
    targets: Bound = {}
    # At a very high level the posterior is uniform.
    variance = measure_level(latents[0], by_class, linear, len(t), 1e12)["irreducible"]
    if not variance.any():
        raise InputError(f"probe: the images{' of each class' * by_class} do not differ, so targets have no noise")
    about = [lit_knn.__version__, images.device.type, describe(images.index), t]
    about += [*map(ReferenceSet.fingerprint, sets.values())]
    about += [[own.seed, len(own.ids), own.reference.fingerprint()] for own in latents]
    with progress_bar(len(t), "Probe", " levels") as bar:
        for number, level in enumerate(t):
            path = folder / fingerprint(about) / f"{number}.npz"
            if not (columns := load_tensors(path)):
                # Their indexes take long to build, and a finished probe needs none.
                targets = targets or {
                    name: {label: make().bind(own) for label, own in sets.items()} for name, make in TARGETS.items()
                }
                columns = measure_level(latents[0], by_class, targets | linear, number, level) | {"variance": variance}
                for held_out in latents[1:]:
                    rest = measure_level(held_out, by_class, linear, number, level)
                    columns |= {"held_out": rest["exact"], "wiener_held_out": rest["wiener"]}
                save_tensors(path, **columns)
            levels.append(columns)
            bar.update()
    return {name: torch.stack([columns[name] for columns in levels]) for name in levels[0] if name != "exact"}


@torch.no_grad()
def measure_level(latents: NoisyLatents, by_class: bool, bound: Bound, level: int, t: float) -> Columns:
    """Measure noise level t, the one with this number. Every draw is a function of (seed, batch, level, estimator).

    `bound` is to the images to train on. The source of its estimators is drawn from the posterior.
    """
    parts, (z, x) = [], latents.batch(range(len(latents.ids)), t)
    labels = torch.as_tensor(latents.reference.labels)[latents.ids] if by_class else torch.zeros_like(latents.ids)
    sets = {label: linear.reference for label, linear in bound["wiener"].items()}
    if absent := {*labels.tolist()} - {*sets}:
        raise InputError(f"probe: all images of class {min(absent)} are held out; give a smaller held_out")
    size = max(min(BATCH_SIZE, POSTERIOR_BYTES // (8 * max(images.N for images in sets.values()))), 1)
    batches = [(label, rows) for label, group in rows_by_label(labels).items() for rows in group.split(size)]
    for batch, (label, rows) in enumerate(batches):
        key = (latents.seed, batch, level)
        mean, draws, part = posterior(sets[label], z[rows], t, keyed_generator(z.device, *key, Stream.SOURCE))
        part["exact"] = (mean - x[rows]).square().flatten(1).mean(1)
        for i, (name, of_class) in enumerate(bound.items()):
            truth = x[rows].double() if name == "wiener" else mean  # The others are targets.
            errors = repeated_errors(of_class[label], REPEATS, z[rows], t, truth, draws.__getitem__, (*key, i))
            part |= {name: errors["mse"], f"{name}_ms": errors[TIME]}
        parts.append(part)
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def posterior(images: ReferenceSet, z: Tensor, t: float, generator: Generator) -> tuple[Tensor, Tensor, Columns]:
    """Enumerate the posterior p_t(x|z), Eq. 2 (eq:posterior), at z (B, *shape).

    Returns its mean, (B, *shape) float64; images drawn from it, (REPEATS, B, *shape); and four columns.
    """
    p = log_posterior(all_sq_dist(images, z), t).exp()
    mean, sq_norm = p.new_zeros(len(z), images.d), p.new_zeros(len(z))
    for start, chunk in images.chunks(chunk_rows(images.d)):
        x, share = chunk.flatten(1).double(), p[:, start : start + len(chunk)]
        mean += share @ x
        sq_norm += share @ x.square().sum(1)
    variance = sq_norm - mean.square().sum(1)
    columns = {"irreducible": variance.where(variance > 1e-12 * sq_norm, 0.0) / images.d}  # The rest is rounding.
    columns |= {"images": torch.special.entr(p).sum(1).exp(), "collapsed": (p.amax(1) > COLLAPSED).double()}
    ids = torch.multinomial(p, REPEATS, replacement=True, generator=generator)
    # A draw could be the source of z, so it is among a tenth of the images. An image and its mirror image are one.
    number = torch.arange(images.N, device=z.device) % len(images.images)
    p *= (number % 10 == 0) | (number == ids[:, :1] % len(images.images))
    columns["collapsed_tenth"] = (p.amax(1) > COLLAPSED * p.sum(1)).double()
    return mean.reshape(z.shape), images.gather(ids.T), columns
