"""Prints what the stand-in GPU counts in estimators and training steps: `python -m tests.gpu_counts`.

`python -m tests.gpu_counts --estimate` counts one call at the size of a training step, in a few minutes, and estimates
its time on an H200 from its data sheet.
"""

import os
import sys
import tempfile
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import pytorch_lightning as pl
import torch

from benchmarks.gpu.estimators import ENTRIES, NOISE_LEVEL
from benchmarks.gpu.images import synthetic_images
from benchmarks.gpu.roofline import Sizes
from lit_knn.callbacks import StepProgressBar
from lit_knn.commands.trainer import Trainer
from lit_knn.data import Digits
from lit_knn.estimators import KNN, OneSample
from lit_knn.index import TorchIndex
from lit_knn.modules import LitEDM, LitICT
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from tests import ROOT
from tests.every_estimator import every_class_estimator, every_estimator
from tests.pretend_cuda import PretendCuda, install_fake_faiss_gpu

N, B, SHAPE = 2000, 64, (3, 32, 32)
FIRST, STEPS = 5, 10
AT_SCALE = Sizes(B=1024, N=50_000, d=3072, k=2048, n=256, r=512)
# Data sheet of an H200: bytes a second, and operations a second by number type. float32 without tensor cores.
BANDWIDTH = 4.8e12
RATES = {"bfloat16": 989e12, "int8": 1979e12, "float32": 67e12, "float64": 67e12}
# A launch costs the host about this long, in seconds. The GPU hides it behind longer kernels, so this counts too much.
LAUNCH = 4e-6
STEP = 0.3


def estimator_counts(gpu, make, index=None, labelled=False):
    """Count one call after a first one: N random images, B latents with t from 0.1 to 80."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, *SHAPE), dtype=torch.uint8, generator=generator)
    labels = torch.arange(N) % 10 if labelled else None
    reference = ReferenceSet(images, index, labels=labels).to(torch.device("cuda"))
    estimator = make()
    if estimator.needs_reference:
        estimator.bind(reference)
    t = torch.logspace(-1, 1.903, B, dtype=torch.float64).cuda()
    x = reference.gather(torch.arange(B).cuda())
    z = x + t.float().reshape(-1, 1, 1, 1) * torch.randn(x.shape, generator=generator).cuda()
    labels = reference.labels[:B] if labelled else None
    for seed in range(2):
        drawn = torch.Generator("cuda").manual_seed(seed)
        with gpu.record() as seen:
            estimator.posterior_mean(z, t, x, drawn, labels)
    return seen


class Recorder(pl.Callback):
    """Records `STEPS` steps, from the start of one batch to the start of another, with the loading of the batches."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.seen = None
        self.block = ExitStack()

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == FIRST:
            self.seen = self.block.enter_context(self.gpu.record())
        if trainer.global_step == FIRST + STEPS:
            self.block.close()


def step_counts(gpu, model):
    """Count training steps between two logs, as the command line trains, with a progress bar."""
    recorder = Recorder(gpu)
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": FIRST + STEPS + 1, "logger": False, "enable_checkpointing": False}
        options |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
        callbacks = [recorder, StepProgressBar()]
        trainer = Trainer(
            accelerator="gpu", devices=1, default_root_dir=folder, callbacks=callbacks, log_every_n_steps=50, **options
        )
        trainer.fit(model, Digits(batch_size=64, index=TorchIndex()))
    return recorder.seen


def networks_and_estimators():
    """The modules to train, by name."""

    def net():
        return UNet(1, channels=8, multipliers=(1, 2), blocks=1)

    return {
        "LitICT, OneSample": lambda: LitICT(net(), OneSample()),
        "LitICT, KNN": lambda: LitICT(net(), KNN(k=512, n=64)),
        "LitEDM, OneSample": lambda: LitEDM(net(), OneSample()),
        "LitEDM, KNN": lambda: LitEDM(net(), KNN(k=512, n=64)),
    }


def estimators():
    """Name, function that makes the estimator, index, and whether it takes labels."""
    for name, make in every_estimator(k=1024).items():
        yield name, make, None, False
        if "knn" in name and "subspace" not in name:
            yield f"{name}, TorchIndex", make, TorchIndex(), False
    for name, make in every_class_estimator(k=64, n=32, r=32).items():
        yield f"by class: {name}", make, TorchIndex(), True


def estimated_seconds(seen, sizes):
    """Estimate the seconds of a recorded call: bytes, products and launches, one after the other."""
    gathers = sum(count for name, count in seen.op_names.items() if name.startswith("lit_knn::"))
    # The stand-in counts the whole set for a gathering operation, which reads the drawn images.
    drawn = gathers * (sizes.B * sizes.n - sizes.N) * sizes.d
    products = sum(count / RATES[dtype] for dtype, count in seen.flops.items())
    return (seen.bytes + drawn) / BANDWIDTH + products + seen.ops * LAUNCH


def estimate(gpu):
    """Print counts and the estimated time of a call of each estimator at the size of a training step."""
    images = synthetic_images(AT_SCALE.N, SHAPE, torch.device("cpu"))
    x = images[: AT_SCALE.B].float() / 127.5 - 1
    z, x = (x + NOISE_LEVEL * torch.randn(x.shape)).cuda(), x.cuda()
    print(f"One call, {AT_SCALE}, t = {NOISE_LEVEL:g}; ms and share of a step of {1000 * STEP:g} ms are estimates:\n")
    print(f"{'estimator':28} {'syncs':>6} {'ops':>6} {'GB':>6} {'TFLOP':>6} {'ms':>6} {'share':>6}")
    for name, entry in ENTRIES.items():
        reference = ReferenceSet(images, None if entry.index is None else entry.index(AT_SCALE)).to("cuda")
        estimator = entry.make(AT_SCALE)
        estimator.bind(reference)
        generator = torch.Generator("cuda").manual_seed(0)
        # The first call computes what later ones share, such as norms.
        estimator.posterior_mean(z[:32], NOISE_LEVEL, x_source=x[:32], generator=generator)
        with gpu.record() as seen:
            estimator.posterior_mean(z, NOISE_LEVEL, x_source=x, generator=generator)
        seconds, products = estimated_seconds(seen, AT_SCALE), sum(seen.flops.values()) / 1e12
        row = f"{seen.syncs:6} {seen.ops:6} {seen.bytes / 1e9:6.2f} {products:6.2f} {1000 * seconds:6.2f}"
        print(f"{name:28} {row} {seconds / STEP:6.1%}", flush=True)


def main():
    warnings.simplefilter("ignore")
    root = ROOT
    if "--estimate" in sys.argv:
        with PretendCuda(project=str(root)) as gpu, install_fake_faiss_gpu():
            estimate(gpu)
        return
    with PretendCuda(project=str(root)) as gpu, install_fake_faiss_gpu():
        print(f"One call, N = {N} uint8 images {SHAPE}, B = {B}, t from 0.1 to 80:\n")
        print(f"{'estimator':38} {'syncs':>6} {'ops':>6} {'MB':>8}")
        for name, make, index, labelled in estimators():
            seen = estimator_counts(gpu, make, index, labelled)
            print(f"{name:38} {seen.syncs:6} {seen.ops:6} {seen.bytes / 1e6:8.0f}")
        print(f"\nOne training step between logs, mean of {STEPS}, digits, B = 64:\n")
        for name, make in networks_and_estimators().items():
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                seen = step_counts(gpu, make())
            print(f"{name}: {seen.syncs / STEPS} syncs, {seen.ops / STEPS} ops")
            for (kind, site), count in seen.sync_sites.most_common():
                print(f"   {count / STEPS:5.1f} x {kind:12} {site}")


if __name__ == "__main__":
    main()
