"""Says what better targets would bring on your data, before you train: `lit-knn probe --data …`, see docs/probe.md."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import yaml

from lit_knn.common.errors import check_at_least
from lit_knn.common.files import written_whole
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.common.tables import text_table, write_rows
from lit_knn.data import ReferenceDataModule
from lit_knn.figures import probe_figure, save_figure
from lit_knn.metrics.estimator_error import mean_and_error, share_and_error
from lit_knn.metrics.latents import NoisyLatents, noise_grid
from lit_knn.metrics.probe import TARGETS, Columns, measure
from lit_knn.modules import LitECT, LitEstimator, LitFlow, LitMeanFlow
from lit_knn.modules.base import check_device
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.reference.reference_set import chunk_rows
from lit_knn.reference.streaming import all_sq_dist, batches_of
from lit_knn.sampling.schedules import consistency_weight, edm_weight, log_normal_sigmas

# Constants of Karras et al. 2022, Table 1. Values that differ by more than this factor get a remark.
EDM, FACTOR = {"sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0}, 1.5
# Draws from the noise levels of a training. Their sums err by less than the latents do.
DRAWS = 100_000
# Name, noise levels (DRAWS,), weights of the target's squared error in the loss (DRAWS,), milliseconds of a pass.
Training = tuple[str, np.ndarray, np.ndarray, float]


def probe(
    self: pl.Trainer,
    model: pl.LightningModule,
    datamodule: ReferenceDataModule,
    levels: int = 24,
    latents: int = 256,
    held_out: float = 0.1,
    by_class: bool = False,
    t_min: float = 0.002,
    t_max: float = 80.0,
    out: str = "probe",
) -> None:
    """Show what better targets would bring on the data: from exact posteriors, in minutes, without any training.

    An interrupted measurement continues. See docs/probe.md for what the numbers mean.

    Args:
        self: Lightning's trainer.
        model: the module that would be trained: its noise levels, the weight of its loss and the time of its network
            count. For LitEstimator the levels and the weight are EDM's.
        datamodule: the data.
        levels: number of noise levels, evenly spaced in their logarithm.
        latents: noisy latents at each level, each from another image.
        held_out: share of the images to keep out, to see how far the posterior is from theirs; not of prepared data.
        by_class: take posteriors over the images of the latent's class; a class-conditional model does anyway.
        t_min: lowest noise level.
        t_max: highest noise level.
        out: folder for the table, the picture, and probe.yaml with settings for `fit -c`.
    """
    check_device(self.strategy.root_device)
    check_at_least(2, latents=latents)
    check_at_least(0, held_out=held_out)
    model.trainer, t, folder, data = self, noise_grid(levels, t_min, t_max), Path(out).expanduser(), datamodule
    data.setup("validate")
    assert data.reference is not None
    sets = data.reference, data.held_out_reference
    if held_out > 0 and not (data.held_out or data.mapped or data.sharded):
        data.held_out, data.train_images = max(round(held_out * len(data.reference.images)), 1), None
        sets = data.sets(data.reference.images, data.reference.labels, data.index)
    drawn = [NoisyLatents(own.to(self.strategy.root_device), latents, data.seed) for own in sets if own is not None]
    table = measure(drawn, by_class or bool(getattr(model, "conditioning", None)), t, folder / "levels")
    training = training_of(model, drawn[0].reference.shape, data.seed)
    lines = conclude(np.array(t), table, training)
    options, rules = constants(drawn[0], model)
    with written_whole(folder / "probe.yaml") as partial:
        text = yaml.safe_dump({"model": {"init_args": options}}, sort_keys=False)
        partial.write_text("".join(f"# {line}\n" for line in lines + rules) + text)
    rows: list[dict[str, Any]] = [{"t": level, "latents": len(drawn[0].ids)} for level in t]
    for name, values in table.items():
        for row, own, one_sample in zip(rows, values, table["irreducible"], strict=True):
            row[name], row[f"{name}_se"] = share_and_error(own, one_sample) if name in TARGETS else mean_and_error(own)
    # A share of nothing is NaN, and empty in the file.
    write_rows(folder / "probe.csv", [{name: "" if v != v else v for name, v in row.items()} for row in rows])
    save_figure(probe_figure(rows, training[1]), folder / "probe")
    shown = [name for name in rows[0] if not name.endswith(("_se", "_ms"))]
    print(text_table(rows, dict.fromkeys(shown, ".3g")), *lines, *rules, sep="\n")
    print(f"Table, picture and settings: {folder / 'probe'}.csv, .png and .yaml")


def training_of(model: Any, shape: Sequence[int], seed: int) -> Training:
    """Return what counts of a training; a module that is not trained gets EDM's noise levels and weights.

    In consistency training an error of μ̂ moves ẑ by (1 − r/t) times the error with Euler's step, so to first order the
    weight is (1 − r/t)²/(t − r).
    """
    generator, name, h = keyed_generator("cpu", seed, Stream.PROBE), type(model).__name__, model.hparams
    if isinstance(model, ConsistencyTraining):
        model.loaded_step = 2**62  # Schedules of levels end with the finest, where most of the training is.
        name, (sigma, r) = f"{name} (to first order, see docs/probe.md)", model.draw_levels(DRAWS, generator)
        weight = consistency_weight(sigma, r) * (1 - r / sigma).square()
    elif isinstance(model, (LitFlow, LitMeanFlow)):  # Their loss is that of the velocity.
        t = model.draw_times(DRAWS, generator)
        sigma, weight = model.process.sigma(t), model.process.velocity(0 * t, t, torch.ones_like(t)).square()
    else:
        sigma = log_normal_sigmas(DRAWS, h.get("P_mean", -1.2), h.get("P_std", 1.2), generator)
        weight = edm_weight(sigma, h.get("sigma_data", EDM["sigma_data"]))
    if isinstance(model, LitEstimator):
        return "EDM", sigma.numpy(), weight.numpy(), math.inf
    device = model.to(model.trainer.strategy.root_device).device
    z, watch, seconds = torch.zeros(8, *shape, device=device), Stopwatch(device), math.inf
    for _ in range(4):  # The first pass also allocates, and other programs disturb single passes.
        with watch.measure():
            model.evaluate_network(z, torch.ones(8, device=device)).square().mean().backward()
        seconds = min(seconds, watch.read_and_reset())
    return name, sigma.numpy(), weight.numpy(), 1000 * seconds / len(z)


def conclude(t: np.ndarray, table: Columns, training: Training) -> list[str]:
    """Say what was found. Between the levels t, values are interpolated in ln t; outside they are those of the ends."""
    name, sigma, weight, pass_ms = training
    means = {column: values.mean(1).numpy() for column, values in table.items()}

    def last(values: np.ndarray, least: float) -> tuple[float, str]:
        """Return the highest level where `values` reach `least`, as number and text: 0 for none, ∞ for the last one."""
        from_right = np.maximum.accumulate(values[::-1])[::-1]
        level = float(np.exp(np.interp(-least, -from_right, np.log(t), left=-math.inf, right=math.inf)))
        return level, {0.0: f"<{t[0]:.3g}", math.inf: f">{t[-1]:.3g}"}.get(level, f"{level:.3g}")

    (low, collapse), (_, of_tenth) = (last(means[column], 0.99) for column in ("collapsed", "collapsed_tenth"))
    high, stf = last(means["STF"] / means["irreducible"].clip(1e-30), 0.01)
    _, flat = last(1 - means["irreducible"] / means["variance"], 0.01)
    # An average over the noise levels of the training is a sum over the measured levels with these weights.
    near = np.stack([np.interp(np.log(sigma), np.log(t), one) for one in np.eye(len(t))])
    in_loss, noise = torch.from_numpy(near @ weight / weight.sum()), weight * (means["irreducible"] @ near)
    above, outside = np.mean(sigma > low), np.mean((sigma < t[0]) | (sigma > t[-1]))
    inside = noise[(sigma > low) & (sigma < high)].sum() / max(noise.sum(), 1e-300)
    lines = [f"Nothing to gain: nearly all noise levels of {name} are below the collapse."] if above < 0.01 else []
    for own in reversed(TARGETS):
        left, error = share_and_error(in_loss @ table[own], in_loss @ table["irreducible"])
        ms = (near.mean(1) @ means[f"{own}_ms"]).item()
        cost = f"{ms:.2g} ms an image" + (f", {ms / pass_ms:.0%} of a network pass" if pass_ms < math.inf else "")
        lines.append(f"{own} removes {1 - left:.2%} ± {error:.2%} of the target noise of {name}; it costs {cost}.")
    beyond = f"{outside:.1%} of the noise levels are outside those measured, and count as the nearest one."
    return [
        *lines,
        f"Collapse: up to level {collapse} at least 99 % of the posteriors are one image, so all estimators agree.",
        f"With a tenth of the images that level is {of_tenth}. {above:.1%} of the noise levels are above {collapse}.",
        f"Better targets pay up to level {stf}; above it STF leaves less than 1 % of the noise of one sample.",
        f"{inside:.1%} of the target noise is between these levels. Above level {flat} the denoiser is the mean image.",
        *([] if beyond.startswith("0.0%") else [beyond]),
    ]


def constants(latents: NoisyLatents, model: Any) -> tuple[dict[str, Any], list[str]]:
    """Return EDM's constants for this data, those that are options of the model, and a line for each with its rule."""
    images, x = latents.reference, latents.batch(range(len(latents.ids)), 0.0)[1]
    sq_dist = torch.cat([all_sq_dist(images, x[rows]).sort().values[:, [1, -1]] for rows in batches_of(x, images.N)])
    nearest, largest = sq_dist[:, 0].clamp(min=0).median().sqrt().item(), sq_dist[:, 1].amax().sqrt().item()
    mean, chunks = images.sum().mean() / images.N, images.chunks(chunk_rows(images.d))
    sigma_data = (sum((c - mean).square().sum().item() for _, c in chunks) / (images.N * images.d)) ** 0.5
    sigma_min, rule = 2 / 255 / 4, "a quarter of the step of a pixel, as EDM's"
    if images.images.dtype != torch.uint8:
        sigma_min = sigma_data * EDM["sigma_min"] / EDM["sigma_data"]
        rule = f"EDM's share of sigma_data; the nearest image is {nearest:.3g} away (median)"
    rules = {
        "sigma_data": (sigma_data, "the standard deviation of all values"),
        "sigma_min": (sigma_min, rule),
        "sigma_max": (largest, f"the largest distance from {len(x)} images to all (Song & Ermon 2020, Technique 1)"),
    }
    lines = ["P_mean, P_std: they do not follow from the data. EDM chose them by the loss of trained networks."]
    for name, (value, rule) in rules.items():
        fits = 1 / FACTOR <= value / EDM[name] <= FACTOR
        lines.append(f"{name}: {value:.4g}, {rule}." + ("" if fits else f" The {EDM[name]:g} of EDM does not fit."))
    # Tuning keeps the sigma_data of the network that it starts from.
    h: Any = EDM if isinstance(model, LitEstimator) else {} if isinstance(model, LitECT) else model.hparams
    options: dict[str, Any] = {name: float(f"{value:.4g}") for name, (value, _) in rules.items() if name in h}
    if "sampling_sigmas" in h:  # A consistency model samples from its highest level.
        top = options["sigma_max"]
        options["sampling_sigmas"] = [top, *(sigma for sigma in h["sampling_sigmas"][1:] if sigma < top)]
    return options, lines
