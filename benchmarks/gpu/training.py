"""Images per second of iCT and EDM training at the paper's size, in float32, in bfloat16 and compiled."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from benchmarks.common import Rows, markdown, number
from benchmarks.gpu.images import synthetic_images
from benchmarks.gpu.timing import MIB, release, wait, why
from lit_knn.common.errors import first_line
from lit_knn.common.lightning_log import lightning_messages
from lit_knn.data.batches import ReferenceBatches
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitICT
from lit_knn.nets import DDPMpp, NCSNpp
from lit_knn.reference import ReferenceSet
from lit_knn.runs.clock import training_clock


class Size(NamedTuple):
    """Size of a training: the networks' width and depth, the images, the batch and the numbers of steps."""

    channels: int
    blocks: int
    N: int
    batch_size: int
    warm_up: int
    steps: int


SHAPE = (3, 32, 32)
# Tables 1 and 2: DDPM++ and NCSN++ with 128 channels and 4 blocks. A batch of 128 fits every GPU of 24 GiB.
PAPER = Size(128, 4, 20_000, 128, warm_up=3, steps=8)
SMALL = Size(8, 1, 64, 4, warm_up=1, steps=2)
# Lightning's names of the precisions, and whether the network is compiled.
PRECISIONS = {"fp32": ("32-true", False), "bf16": ("bf16-mixed", False)}
COMPILED = {"bf16, compiled": ("bf16-mixed", True)}


class StepClock(pl.Callback):
    """Reads the clock of the training over the optimiser steps after a warm-up, in which the first steps take memory.

    Args:
        warm_up: steps before the clock starts.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.started = False
        self.values: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Start after the warm-up, and stop after the last step."""
        start, stop = (
            trainer.global_step >= self.warm_up and not self.started,
            trainer.global_step >= trainer.max_steps,
        )
        if not (start or stop):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        if start:
            self.started = True
            training_clock(trainer).start()
        else:
            self.values = training_clock(trainer).averages()


def _ict(size: Size) -> pl.LightningModule:
    net = NCSNpp(
        32, 3, size.channels, (2, 2, 2), size.blocks, (16,), dropout=0.3, fourier_scale=0.02
    )
    return LitICT(net, OneSample())


def _edm(size: Size) -> pl.LightningModule:
    return LitEDM(
        DDPMpp(32, 3, size.channels, (2, 2, 2), size.blocks, (16,), dropout=0.13), OneSample()
    )


MODELS: dict[str, Callable[[Size], pl.LightningModule]] = {"iCT, NCSN++": _ict, "EDM, DDPM++": _edm}


def measure(
    size: Size,
    device: torch.device,
    precisions: Mapping[str, tuple[str, bool]],
    time_is_left: Callable[[], bool],
) -> Rows:
    """Train each model in each precision with the one-sample estimator; one row each."""
    images = synthetic_images(size.N, SHAPE, device)
    rows: Rows = []
    for precision, (lightning_name, compiled) in precisions.items():
        for name, make in MODELS.items():
            row: dict[str, Any] = {"model": name, "precision": precision, "note": ""}
            if time_is_left():
                try:
                    row |= _trained(
                        make(size), ReferenceSet(images), size, device, lightning_name, compiled
                    )
                except (
                    Exception
                ) as error:  # Compilers, libraries and drivers raise errors of many types.
                    # A machine may lack what a compiler needs.
                    row["note"] = first_line(error) if compiled else why(error)
                release(device)
            else:
                row["note"] = "no time left"
            rows.append(row)
    return rows


def _trained(
    model: pl.LightningModule,
    reference: ReferenceSet,
    size: Size,
    device: torch.device,
    precision: str,
    compiled: bool,
) -> dict[str, Any]:
    """Train a few steps. Returns the images per second and the peak of memory."""
    callbacks: list[pl.Callback] = []
    if compiled:
        # This package also needs matplotlib and torchvision.
        from lit_knn.callbacks import NetworkSpeed

        callbacks.append(NetworkSpeed())
    clock = StepClock(size.warm_up)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with lightning_messages(logging.ERROR), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision=precision,  # type: ignore[arg-type]
                max_steps=size.warm_up + size.steps, log_every_n_steps=10**6, logger=False, barebones=False,
                enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
                callbacks=[*callbacks, clock],
            )  # fmt: skip
            trainer.fit(model, ReferenceBatches(reference, size.batch_size))
        wait(device)
    finally:  # Free the memory of the model.
        model.cpu()
        torch._dynamo.reset()
    peak = torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else float("nan")
    return {"images_per_s": clock.values["train/images_per_s"], "peak_mib": peak}


def step_ms(rows: Rows, images: int, d: int) -> float:
    """Return the milliseconds in which iCT trains on this many images in float32; NaN without a measurement of them."""
    speed = rows[0].get("images_per_s") if rows and d == math.prod(SHAPE) else None
    return float("nan") if speed is None else 1000 * images / speed


def table(rows: Rows) -> str:
    """Make a Markdown table; ratios are to float32 of the same model."""
    lines = [["model", "precision", "images/s", "ratio", "peak memory, MiB"]]
    plain = {row["model"]: row.get("images_per_s") for row in rows if row["precision"] == "fp32"}
    for row in rows:
        speed, base = row.get("images_per_s"), plain.get(row["model"])
        if speed is None:
            lines.append([row["model"], row["precision"], row["note"], "", ""])
            continue
        ratio = f"{speed / base:.2f}" if base else ""
        lines.append(
            [row["model"], row["precision"], f"{speed:.4g}", ratio, number(row["peak_mib"])]
        )
    return markdown(lines)
