"""Says what better targets would bring on your data, before you train: `lit-knn probe --data …`, see docs/probe.md."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
import yaml
from torch import Tensor

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.common.files import make_folder, written_whole
from lit_knn.common.progress import progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.settings import describe, fingerprint
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.tables import Row, text_table, write_rows
from lit_knn.data import ReferenceDataModule
from lit_knn.estimators import KNN, STF, Estimator, SubspaceKNN
from lit_knn.figures import probe_figure, save_figure
from lit_knn.metrics.estimator_error import MeanAndError, mean_and_error, share_and_error
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.metrics.probe import Level, Probe, distances
from lit_knn.modules.base import check_device
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.modules.ect import LitECT
from lit_knn.modules.regression import PosteriorRegression
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.schedules import consistency_weight, edm_weight, log_normal_sigmas

# A step after the end of all schedules.
END = 2**62
# Draws from the noise levels of a training. Their sums err by less than the latents do.
DRAWS = 100_000
# Up to the level of collapse, at least this share of the posteriors is one image.
COLLAPSE_SHARE = 0.99
# Above the level of STF, it leaves less than this share of the noise of one sample.
STF_SHARE = 0.01
# From this level on, the denoiser is the mean image up to this share of the data's variance.
MEAN_SHARE = 0.01
# With a smaller share of its noise levels above the collapse, a training gains nothing from better targets.
LEAST_SHARE = 0.01
# Constants of Karras et al. 2022, Table 1. Values that differ by more than this factor get a remark.
EDM, FACTOR = {"sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0}, 1.5
# EDM's sigma_min for 8-bit images is a quarter of the step of a pixel.
QUARTER_STEP = 2 / 255 / 4


ROUGH = (
    "For a consistency model this is to first order of Euler's step and a squared loss: on the digits 2 to 5 times as "
    "much of the noise stays in the gradients (docs/probe.md)."
)


class TrainingNoise(NamedTuple):
    """The noise levels at which a module trains, and the weight of its target's error in the loss."""

    name: str
    sigma: Tensor  # (DRAWS,) float64
    weight: Tensor  # (DRAWS,) float64, up to a factor

    @classmethod
    def of(cls, model: pl.LightningModule, shape: Sequence[int], seed: int) -> "TrainingNoise":
        """Draw the noise levels of a module; one that is not trained gets EDM's levels and weights.

        The loss of EDM and of flows is quadratic in the target, and its second difference is the weight. In consistency
        training an error of μ̂ moves ẑ by (1 − r/t) times the error with Euler's step, so to first order the weight is
        (1 − r/t)²/(t − r).
        """
        generator, name = keyed_generator("cpu", seed, Stream.PROBE), type(model).__name__
        if isinstance(model, ConsistencyTraining):
            model.loaded_step = END  # Schedules of levels end with the finest, where most of the training is.
            t, r = model.draw_levels(DRAWS, generator)
            return cls(name, t, consistency_weight(t, r) * (1 - r / t).square())
        if not isinstance(model, PosteriorRegression):
            t = log_normal_sigmas(DRAWS, generator=generator)  # The defaults are EDM's.
            return cls("EDM", t, edm_weight(t, EDM["sigma_data"]))
        model.eval()  # Dropout would change the network between the three losses.
        t = model.draw_times(DRAWS, generator)
        # The weight is a smooth function of the time, so a table of it is enough.
        at = t.quantile(torch.linspace(0, 1, 65, dtype=torch.float64))
        z, target = torch.zeros(len(at), *shape), torch.full((len(at), *shape), 1e4)
        label = torch.zeros(len(at), dtype=torch.int64) if model.conditioning else None
        with torch.no_grad():
            up, middle, down = (model.item_losses(z, at, i * target, label, None).double() for i in (1, 0, -1))
        table = ((up - 2 * middle + down) / 2e8).log()
        weight = np.interp(t.log().numpy(), at.log().numpy(), table.numpy())
        return cls(name, model.process.sigma(t), torch.from_numpy(weight).exp())


class Findings(NamedTuple):
    """Holds what follows from the values of all levels and the noise levels of a training. None means at no level."""

    collapse: float | None  # up to this level the posterior is one image
    collapse_tenth: float | None  # the same for a tenth of the images
    stf_level: float | None  # above this level STF leaves less than 1 % of the noise of one sample
    mean_level: float | None  # above this level the denoiser is the mean image
    above_collapse: float  # share of the training's noise levels
    outside: float  # share of them that are below the lowest or above the highest measured level
    noise_in_band: float  # share of the target's noise in the loss that is between `collapse` and `stf_level`
    removed: dict[str, MeanAndError]  # share of the target's noise in the loss that an estimator removes
    ms: dict[str, float]  # milliseconds of an estimate, averaged over the noise levels of the training


def crossing(t: Sequence[float], values: Sequence[float], least: float) -> float | None:
    """Return how far in t `values` stay at or above `least`, interpolated in ln t; None if the first one is below."""
    below = next((i for i, value in enumerate(values) if value < least), len(t))
    if below in (0, len(t)):
        return t[-1] if below else None
    share = (values[below - 1] - least) / (values[below - 1] - values[below])
    return t[below - 1] * (t[below] / t[below - 1]) ** share


def conclude(
    t: Sequence[float], levels: Sequence[Level], estimators: Sequence[str], noise: TrainingNoise, variance: float
) -> Findings:
    """Draw the conclusions. Between the levels, values are interpolated in ln t; outside they are those of the ends."""
    means = {name: [level[name].mean().item() for level in levels] for name in levels[0]}
    collapse, of_tenth = (crossing(t, means[name], COLLAPSE_SHARE) for name in ("collapsed", "collapsed_tenth"))
    left = [-stf / max(one, 1e-30) for stf, one in zip(means["STF"], means["irreducible"], strict=True)]
    stf_level = crossing(t[::-1], left[::-1], -STF_SHARE)
    mean_level = crossing(t[::-1], [one / variance for one in means["irreducible"]][::-1], 1 - MEAN_SHARE)

    # Each draw of the training belongs to the two levels beside it.
    place = np.interp(noise.sigma.log().numpy(), np.log(t), np.arange(len(t)))
    lower = np.minimum(place.astype(int), len(t) - 2)

    def over_training(name: str, weights: Any) -> Tensor:
        """Average values over the noise levels of the training, (latents,)."""
        share = np.bincount(lower, weights * (lower + 1 - place), len(t))
        share += np.bincount(lower + 1, weights * (place - lower), len(t))
        return torch.stack([level[name] for level in levels], dim=1) @ torch.from_numpy(share / weights.sum())

    weights = noise.weight.double().numpy()
    removed = {}
    for name in estimators:
        kept = share_and_error(over_training(name, weights), over_training("irreducible", weights))
        removed[name] = kept._replace(mean=1 - kept.mean)
    ms = {name: over_training(f"{name}_ms", np.ones(DRAWS)).mean().item() for name in estimators}
    low, high = collapse or 0.0, stf_level or math.inf
    sources = weights * np.interp(place, np.arange(len(t)), means["irreducible"])
    inside = ((noise.sigma > low) & (noise.sigma < high)).numpy()
    in_band, above = float(sources[inside].sum() / (sources.sum() or 1.0)), (noise.sigma > low).double().mean().item()
    outside = ((noise.sigma < t[0]) | (noise.sigma > t[-1])).double().mean().item()
    return Findings(collapse, of_tenth, stf_level, mean_level, above, outside, in_band, removed, ms)


def sentences(found: Findings, noise: TrainingNoise, pass_ms: float | None) -> list[str]:
    """Say what was found; the first sentence is the verdict."""

    def gain(name: str) -> str:
        mean, error = found.removed[name]
        ms = found.ms[name]
        share = "" if pass_ms is None else f", {ms / pass_ms:.0%} of a forward and backward pass of the net"
        return f"{name} removes {100 * mean:.2f} % ± {100 * error:.2f} %; it costs {ms:.2g} ms an image{share}."

    by_gain = sorted(found.removed, key=lambda name: -found.removed[name].mean)
    low = found.collapse or 0.0
    if found.collapse is None:
        collapse = "Nothing has collapsed: at the lowest level fewer than 99 % of the posteriors are one image."
    else:
        tenth = "none" if found.collapse_tenth is None else f"{found.collapse_tenth:.3g}"
        collapse = (
            f"Collapse: up to level {low:.3g} at least 99 % of the posteriors are one image, so that all estimators "
            f"agree. With a tenth of the images that level is {tenth}. {found.above_collapse:.1%} of the noise levels "
            f"of {noise.name} are above it."
        )
    if found.stf_level is None:
        band = f"Better targets pay above {low:.3g}: STF leaves more than 1 % of the noise of one sample at all levels."
    elif found.stf_level <= low:
        band = "STF leaves less than 1 % of the noise of one sample wherever there is noise."
    else:
        band = (
            f"Better targets pay between {low:.3g} and {found.stf_level:.3g}, where STF leaves 1 % of the noise of one "
            f"sample. {found.noise_in_band:.1%} of the target noise is there."
        )
    lines = [f"Of the target noise of {noise.name} on this data, {gain(by_gain[0])}", *map(gain, by_gain[1:])]
    if found.above_collapse < LEAST_SHARE:
        lines = [
            f"Nothing to gain: {found.above_collapse:.1%} of the noise levels are above the collapse.",
            *map(gain, by_gain),
        ]
    if found.outside > LEAST_SHARE:
        band += f" {found.outside:.1%} of the noise levels are outside those measured, and count as the nearest one."
    return [*lines, collapse, band]


def constants(reference: ReferenceSet, measured: Probe, found: Findings) -> tuple[dict[str, float], list[str]]:
    """Return EDM's constants for this data, and a line for each with its rule."""
    nearest, largest = distances(reference, measured.latents, measured.seed)
    pixels = reference.images.dtype == torch.uint8
    mean_level = "only above these levels" if found.mean_level is None else f"from level {found.mean_level:.3g} on"
    rules = {
        "sigma_data": (measured.scale.sigma_data, "the standard deviation of all values"),
        "sigma_min": (QUARTER_STEP, "a quarter of the step of a pixel")
        if pixels
        else (
            measured.scale.sigma_data * EDM["sigma_min"] / EDM["sigma_data"],
            f"EDM's share of sigma_data; the nearest image is {nearest:.3g} away (median), "
            f"{nearest / reference.d**0.5:.3g} in each dimension",
        ),
        "sigma_max": (
            largest,
            f"the largest distance from {measured.latents} images to all (Song & Ermon 2020, Technique 1); the "
            f"denoiser is the mean image to 1 % of the variance {mean_level}",
        ),
    }
    lines = []
    for name, (value, rule) in rules.items():
        fits = 1 / FACTOR <= value / EDM[name] <= FACTOR
        lines.append(
            f"{name}: {value:.4g}, {rule}. {'' if fits else f'The {EDM[name]:g} of EDM does not fit.'}".rstrip()
        )
    lines.append("P_mean, P_std: they do not follow from the data. EDM chose them by the loss of trained networks.")
    return {name: float(f"{value:.4g}") for name, (value, _) in rules.items() if value > 0}, lines


def time_of_pass(model: pl.LightningModule, shape: Sequence[int], device: torch.device) -> float | None:
    """Measure a forward and backward pass of the network, in milliseconds an image; None if none is trained."""
    if not isinstance(model, (ConsistencyTraining, PosteriorRegression)):
        return None
    z, watch, seconds = torch.zeros(8, *shape, device=device), Stopwatch(device), []
    model.to(device)
    for _ in range(4):  # The first pass also allocates, and other programs disturb single passes.
        with watch.measure():
            model.evaluate_network(z, torch.ones(8, device=device)).square().mean().backward()
        seconds.append(watch.read_and_reset())
    return 1000 * min(seconds) / len(z)


def rows_of(t: Sequence[float], levels: Sequence[Level], estimators: Sequence[str], variance: float) -> list[Row]:
    """Return a row for each level: means over the latents, and what each estimator leaves of the noise of one sample.

    The share is empty where nothing is left to remove: the noise is rounding.
    """
    rows = []
    for level, found in zip(t, levels, strict=True):
        row: Row = {"t": level, "latents": len(found["irreducible"])}
        there = bool(found["irreducible"].mean() > 1e-12 * variance)
        for name, values in found.items():
            if name in estimators:
                row[name], row[f"{name}_se"] = share_and_error(values, found["irreducible"]) if there else ("", "")
            else:
                row[name], row[f"{name}_se"] = mean_and_error(values)
        rows.append(row)
    return rows


def split(data: ReferenceDataModule, share: float) -> tuple[ReferenceSet, ReferenceSet | None]:
    """Load the data and keep a share of the images out, unless the data has its own number of images to keep out."""
    if not 0 <= share < 1:
        raise InputError(f"probe: held_out is a share of the images, at least 0 and below 1, got {share}")
    data.setup("validate")
    whole = data.reference
    assert whole is not None
    if data.held_out or not share:
        return whole, data.held_out_reference
    if data.mapped or data.sharded:
        raise InputError("probe: held_out would copy images that are mapped from a file or sharded: give --held_out 0")
    # The images to train on are chosen by now.
    data.held_out, data.train_images = max(round(share * len(whole.images)), 1), None
    labels = None if whole.labels is None else whole.labels[: len(whole.images)]
    return data.sets(whole.images, labels, data.index)


def probe(
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    device: torch.device,
    t: list[float],
    latents: int,
    held_out: float,
    by_class: bool,
    folder: Path,
) -> Findings:
    """Measure level by level, keep each, and conclude; see `Trainer.probe`."""
    check_device(device)
    by_class = by_class or bool(getattr(model, "conditioning", None))
    (reference, rest), seed = split(datamodule, held_out), datamodule.seed
    for images in filter(None, (reference, rest)):
        images.to(device)
    estimators: Mapping[str, Estimator] = {"STF": STF(), "KNN": KNN(), "SubspaceKNN": SubspaceKNN()}
    measured, names = Probe(reference, rest, estimators, latents, by_class, seed), list(estimators)
    noise = TrainingNoise.of(model, reference.shape, seed)

    about = {"images": reference.fingerprint(), "held_out": datamodule.held_out, "latents": measured.latents}
    labels = reference.labels if by_class else None
    about |= {"version": lit_knn.__version__, "device": device.type, "index": describe(reference.index)}
    about |= {"labels": [] if labels is None else labels.tolist()}
    about |= {"t": t, "by_class": by_class, "seed": seed} | {name: describe(own) for name, own in estimators.items()}
    kept = folder / "levels" / fingerprint(about)
    make_folder(kept)
    levels: list[Level] = []
    with progress_bar(len(t), "Probe", " levels") as bar:
        for number, level in enumerate(t):
            path = kept / f"{number}.npz"
            found_before = load_tensors(path)
            levels.append(found_before or measured.level(number, level))
            if not found_before:
                save_tensors(path, **levels[-1])
            bar.update()

    variance = measured.scale.variance
    found, rows = conclude(t, levels, names, noise, variance), rows_of(t, levels, names, variance)
    values, rules = constants(reference, measured, found)
    rough = [ROUGH] if isinstance(model, ConsistencyTraining) else []
    lines = [*sentences(found, noise, time_of_pass(model, reference.shape, device)), *rough, *rules]
    # Tuning keeps the sigma_data of the network that it starts from.
    known = values if noise.name == "EDM" else {} if isinstance(model, LitECT) else model.hparams
    own: dict[str, Any] = {name: value for name, value in values.items() if name in known}
    if "sigma_max" in own and "sampling_sigmas" in known:  # A consistency model samples from its highest level.
        lower = [sigma for sigma in model.hparams["sampling_sigmas"][1:] if sigma < own["sigma_max"]]
        own["sampling_sigmas"] = [own["sigma_max"], *lower]
    with written_whole(folder / "probe.yaml") as partial:
        text = yaml.safe_dump({"model": {"init_args": own}}, sort_keys=False)
        partial.write_text("".join(f"# {line}\n" for line in lines) + text)
    write_rows(folder / "probe.csv", rows)
    save_figure(probe_figure(rows, names, noise.sigma, found), folder / "probe")
    columns = ("irreducible", "wiener", "held_out", "wiener_held_out", "images", "collapsed", *names)
    shown = [name for name in columns if name in rows[0]]
    table = [{"t": row["t"], **{name: row[name] if row[name] != "" else math.nan for name in shown}} for row in rows]
    print(text_table(table, {"t": ".3g"} | dict.fromkeys(shown, ".3g")), *lines, sep="\n")
    print(f"Table, picture and settings: {folder / 'probe'}.csv, .png and .yaml")
    return found
