"""`lit-knn probe --data …` tells what better targets would bring on your data, before any training: docs/probe.md."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch

from lit_knn.commands.next_run import command_of_next_run
from lit_knn.commands.probe_files import shown_table, table_rows, write_settings, write_table
from lit_knn.commands.probed_training import training_of
from lit_knn.common.errors import InputError, check_at_least
from lit_knn.common.files import make_folder
from lit_knn.data import ReferenceDataModule
from lit_knn.figures import probe_figure, save_figure
from lit_knn.metrics.edm_constants import EDM, Constant, edm_constants, sentences
from lit_knn.metrics.latents import NoisyLatents, levels_of
from lit_knn.metrics.probe import measure_levels
from lit_knn.metrics.probe_advice import advice_on_few_images
from lit_knn.metrics.probe_verdict import conclude
from lit_knn.modules import LitEstimator
from lit_knn.modules.consistency_module import ConsistencyModule
from lit_knn.modules.model_checks import check_device
from lit_knn.reference.classes import classes_of


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
    """Show what better targets would bring on the data: from exact posteriors, without a training.

    It takes minutes, and an interrupted measurement continues. See docs/probe.md for what the
    numbers mean. The last line is the command of a training with what was found.

    Args:
        self: Lightning's trainer.
        model: the module that would be trained: its noise levels, the weight of its loss and the
            time of its network count. For LitEstimator the levels and the weight are EDM's.
        datamodule: the data.
        levels: number of noise levels, evenly spaced in their logarithm.
        latents: noisy latents at each level, each from another image.
        held_out: share of the images to keep out, to see how far the posterior is from theirs; not
            of sharded data.
        by_class: take posteriors over the images of the latent's class; a class-conditional model
            does anyway.
        t_min: lowest noise level.
        t_max: highest noise level.
        out: folder for the table, the picture, and probe.yaml with settings for `fit -c`.
    """
    device = self.strategy.root_device
    check_device(device)
    check_at_least(2, latents=latents, levels=levels)
    check_share(held_out)
    model.trainer = self
    folder = Path(out).expanduser()
    make_folder(folder)
    t = levels_of(levels, t_min, t_max)
    drawn = draw_latents(datamodule, held_out, latents, device)
    images = drawn[0].reference
    # A module whose levels are not known is refused before the long work.
    training = training_of(model, images.shape, datamodule.seed)
    is_conditional = bool(getattr(model, "conditioning", None))
    table = measure_levels(drawn, by_class or is_conditional, t, folder / "levels")

    constants = edm_constants(drawn[0])
    lines, estimator = conclude(np.array(t), table, training)
    if estimator not in (None, "OneSample"):
        lines += advice_on_few_images(len(images.images) // datamodule.rows_per_image)
    lines += sentences(constants)

    settings = folder / "probe.yaml"
    arguments = self.command_line  # type: ignore[attr-defined]
    # A conditional model has said so in its own options, which the command repeats.
    num_classes = len(classes_of(images)) if by_class and not is_conditional else 0
    command = command_of_next_run(arguments, model, images.shape, settings, estimator, num_classes)
    rows = table_rows(t, table)
    # The rows are printed first, because a failed write must not lose them.
    print(shown_table(rows), *lines, sep="\n")

    write_settings(settings, [*lines, command], options_of(model, constants))
    write_table(folder / "probe.csv", rows)
    save_figure(probe_figure(rows, training.sigma), folder / "probe")
    print(f"Table, picture and settings: {folder / 'probe'}.csv, .png and .yaml")
    print(command)


def check_share(held_out: float) -> None:
    """Raise InputError if `held_out` is no share of the images, but perhaps their number."""
    if not 0 <= held_out < 1:
        rule = "is a share of the images, at least 0 and below 1"
        raise InputError(f"held_out {rule}, got {held_out:g}; --data.held_out is a number of them")


def draw_latents(
    data: ReferenceDataModule,
    held_out: float,
    num: int,
    device: torch.device,
) -> list[NoisyLatents]:
    """Return noisy latents of the images to train on and, if images are held out, latents of these, too.

    Args:
        data: the data. If they hold out no images, the share `held_out` is held out here, except of
            sharded data, because each rank has only some of the images.
        held_out: share of the images to hold out.
        num: number of latents of each set; in a smaller set, each image gets one.
        device: where the images go.
    """
    data.setup("validate")
    assert data.reference is not None
    sets = data.reference, data.held_out_reference

    if held_out > 0 and not data.held_out and not data.sharded:
        images = data.reference.images
        data.held_out = max(round(held_out * len(images) / data.rows_per_image), 1)
        data.train_images = None
        sets = data.sets(images, data.reference.labels, data.index)

    return [NoisyLatents(part.to(device), num, data.seed) for part in sets if part is not None]


def options_of(
    model: pl.LightningModule,
    constants: Mapping[str, Constant],
) -> dict[str, float | list[float]]:
    """Return the measured constants that are options of the model, rounded to four digits.

    Args:
        model: the module. Of a LitEstimator, which is not trained, the options are EDM's.
        constants: the constants by name.
    """
    # Tuning keeps the sigma_data of the network that it starts from.
    if getattr(model, "tunes", False):
        return {}
    known: Mapping[str, object] = EDM if isinstance(model, LitEstimator) else model.hparams

    options: dict[str, float | list[float]] = {}
    for name, constant in constants.items():
        if name in known:
            options[name] = float(f"{constant.value:.4g}")

    # Sampling of a consistency model must start from its highest level, so levels above that are left out.
    if isinstance(model, ConsistencyModule):
        highest = float(f"{constants['sigma_max'].value:.4g}")
        below = [sigma for sigma in model.hparams["sampling_sigmas"][1:] if sigma < highest]
        options["sampling_sigmas"] = [highest, *below]
    return options
