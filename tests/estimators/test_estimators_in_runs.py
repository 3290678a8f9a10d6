"""Estimators in runs: every file of configs/estimators, a network that was trained, and one of the user's own."""

import copy
import shutil

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.data import Digits
from lit_knn.estimators import Network, OneSample
from lit_knn.modules import LitEDM
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from lit_knn.reference import ReferenceSet
from tests import ROOT
from tests.short_training import TRAINER
from tests.toys import noisy, pixels

FILES = sorted((ROOT / "configs" / "estimators").glob("*.yaml"))
# One step with a small network; nothing is measured or kept.
STEP = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.callbacks", "[]"]
STEP += [
    "--trainer.logger",
    "false",
    "--trainer.enable_checkpointing",
    "false",
    "--data.batch_size",
    "8",
]
STEP += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
STEP += ["--model.net.channels", "8"]
UNWARPED = ("monte_carlo", "noised", "patch_posterior", "pca_locality", "smoothed", "wiener")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* the default "),
    pytest.mark.usefixtures("own_folder"),
]


def of_warped(path, run):
    """Extra options for a run that warps images: these estimators refuse warped posteriors."""
    return ["--model.warped", "source"] if path.stem in UNWARPED and run == "table2/edm_knn" else []


# Pairs of a run and an estimator differ only in how their options meet. One run meets every estimator, the others some:
# with and without options, with another estimator within, and one that refuses warped images.
FEW = ("one_sample", "knn", "switched", "smoothed")
PAIRS = [
    pytest.param(
        path, run, marks=() if run == "table1/ict_knn" or path.stem in FEW else pytest.mark.slow
    )
    for run in ("table1/ict_knn", "table2/edm_knn", "flow/cifar10")
    for path in FILES
]


@pytest.mark.parametrize(("path", "run"), PAIRS, ids=lambda value: getattr(value, "stem", value))
def test_it_is_bound_in_the_runs_of_the_tables(path, run):
    options = [
        "--model.estimator",
        str(path),
        "--model.net",
        str(ROOT / "configs" / "models" / "unet.yaml"),
    ]
    options += ["--model.net.channels", "8", "--trainer.accelerator", "cpu"]
    # A net of another class starts from its own defaults, so it has to be told of the augmentation again.
    options += ["--model.net.augment_dim", "9"] if run == "table2/edm_knn" else []
    options += of_warped(path, run)
    estimator = make_cli(
        ["-c", str(ROOT / "configs" / f"{run}.yaml"), *options], run=False
    ).model.estimator
    reference = ReferenceSet(pixels(N=30, shape=(3, 16, 16)))
    if estimator.needs_reference:
        estimator.bind(reference)
    x, t = reference.gather(torch.arange(4)), torch.tensor([1e-4, 0.002, 2.0, 9999.0])
    mean = estimator.posterior_mean(noisy(x, 2.0), t, x_source=x)
    assert mean.isfinite().all()
    assert mean.shape == x.shape


def published(family):
    return family(
        image_size=8,
        in_channels=1,
        channels=32,
        multipliers=[1, 2],
        blocks=1,
        attention_at=[4],
        dropout=0.2,
    )


@pytest.mark.parametrize("family", [UNet, DDPMpp, NCSNpp, ADM])
def test_trained_network_estimates_with_averaged_weights(family, tmp_path):
    # A checkpoint of a published family tells its architecture.
    nets = [UNet(1, channels=8, multipliers=(1, 2), blocks=1) for _ in range(2)]
    if family is not UNet:
        nets = [published(family), None]
    model = LitEDM(nets[0], OneSample(), lr=1e-2, lr_ramp_up_images=0, ema_half_life_images=500)
    saved = LastCheckpoint(dirpath=str(tmp_path))
    pl.Trainer(max_steps=4, callbacks=[saved], **TRAINER).fit(model, Digits(batch_size=16))
    network, z = Network(tmp_path / "last.ckpt", nets[1]), 3 * torch.randn(4, 1, 8, 8)
    sigma = torch.tensor([0.1, 1.0, 5.0, 40.0])
    # After a fit the module itself has the averaged weights.
    with torch.no_grad():
        expected = model.denoiser.eval()(z, sigma)
    torch.testing.assert_close(network.posterior_mean(z, sigma), expected)
    score = (expected - z) / sigma.reshape(-1, 1, 1, 1) ** 2
    torch.testing.assert_close(network.score(z, sigma), score, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="labels are 0 to 0, but the net has num_classes=0"):
        network.posterior_mean(z, sigma, labels=torch.zeros(4, dtype=torch.int64))
    # An average of a module that it teaches does not copy its weights.
    assert copy.deepcopy(network) is network
    # Its weights are its settings, wherever they lie.
    moved = Network(
        shutil.copy(tmp_path / "last.ckpt", tmp_path / "moved.ckpt"), copy.deepcopy(nets[1])
    )
    assert describe(moved) == describe(network)
    next(moved.denoiser.parameters()).data += 1
    assert describe(moved) != describe(network)
