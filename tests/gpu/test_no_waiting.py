"""On a GPU, training waits for the device only at logs; checks speak there, and no checkpoint follows a failure."""

import math
import time
from contextlib import ExitStack

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint, PowerAverages, StepProgressBar
from lit_knn.common.deferred_checks import DeferredChecks
from lit_knn.common.errors import NonFiniteLossError
from lit_knn.common.rng import keyed_generator
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.data import Digits
from lit_knn.estimators import KNN, STF, ByClass, OneSample
from lit_knn.index import TorchIndex
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.nets import DDPMpp
from lit_knn.reference import ReferenceSet
from tests.every_estimator import every_estimator
from tests.networks import write_start
from tests.short_training import TRAINER
from tests.toys import noisy, pixels
from tests.watched import OneBadItem

# These two look at the noise levels on the host.
MAKERS = {
    name: make
    for name, make in every_estimator(k=20, n=16, r=10).items()
    if name[:3] not in ("pca", "pat")
}
CALLS = [
    (name, by_class)
    for name in MAKERS
    for by_class in (False, True)
    if (name, by_class) != ("one_sample", True)
]
GPU = {**TRAINER, "accelerator": "gpu", "devices": 1}


@pytest.mark.parametrize(("name", "by_class"), CALLS)
def test_a_call_of_an_estimator_waits_once_and_in_a_step_never(stand_in, name, by_class):
    labels = torch.arange(60) % 3
    reference = ReferenceSet(pixels(60), TorchIndex(), labels=labels).to("cuda")
    estimator = (ByClass(MAKERS[name]()) if by_class else MAKERS[name]()).bind(reference)
    x = reference.gather(torch.arange(8).cuda())
    z = noisy(x.cpu(), 2.0).cuda()
    for t in (2.0, torch.full((8,), 2.0, device="cuda")):
        given = (z, t, x, keyed_generator("cuda", 1), labels[:8] if by_class else None)
        estimator.posterior_mean(*given)  # The first call may prepare something.
        with stand_in.record() as seen, DeferredChecks().collect(1):
            assert estimator.posterior_mean(*given).is_cuda
        assert seen.syncs == 0, seen.report()
        with stand_in.record() as seen:
            estimator.posterior_mean(*given)
        assert seen.syncs == 1, seen.report()


def net(**options):
    return DDPMpp(
        image_size=8,
        in_channels=1,
        channels=16,
        multipliers=[1],
        blocks=1,
        attention_at=[],
        **options,
    )


AUGMENTED = {"augmentation": GeometricAugmentation(0.4)}
MODULES = {
    "iCT": lambda: LitICT(net(dropout=0.1), KNN(64, 16)),
    "iCT by class, bf16": lambda: LitICT(net(num_classes=10), STF(16), class_conditional=True),
    "EDM, warped": lambda: LitEDM(net(augment_dim=9), KNN(64, 16), **AUGMENTED),
    "flow": lambda: LitFlow(net(augment_dim=9), OneSample(), **AUGMENTED),
    # In the first stage some levels r are 0 and some are not.
    "ECT": lambda: LitECT(
        KNN(64, 16), write_start("start.ckpt", net()), net(dropout=0.1), stage_steps=3
    ),
}


class Recorded(pl.Callback):
    """Records all that waits from the start of the third step to the start of the eighth."""

    def __init__(self, stand_in):
        self.stand_in, self.recorder, self.seen = stand_in, ExitStack(), None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert batch[0].is_cuda
        if trainer.global_step == 2 and self.seen is None:
            self.seen = self.recorder.enter_context(self.stand_in.record())
        elif trainer.global_step == 7:
            self.recorder.close()


# The step of a flow is that of EDM, but for the output of the network.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "flow" else ()) for n in MODULES]
)
def test_no_step_between_two_logs_waits(stand_in, name, tmp_path, own_folder):
    recorded = Recorded(stand_in)
    callbacks = [
        recorded,
        StepProgressBar(),
        LastCheckpoint(dirpath=str(tmp_path)),
        PowerAverages(),
    ]
    shown = {"enable_progress_bar": True, "log_every_n_steps": 8, "default_root_dir": tmp_path}
    shown["limit_train_batches"] = 5  # Steps 2 to 7 hold the end of an epoch.
    shown["precision"] = "bf16-mixed" if "bf16" in name else "32-true"
    trainer = pl.Trainer(**{**GPU, **shown}, max_steps=8, callbacks=callbacks)
    trainer.fit(MODULES[name](), Digits(batch_size=16, index=TorchIndex()))
    assert recorded.seen.syncs == 0, recorded.seen.report()
    assert trainer.current_epoch > 0


def fail(folder, every, **options):
    """Train until the fourth step, which is not finite, is told; return trainer, module and data."""
    callback = LastCheckpoint(every, dirpath=str(folder))
    trainer = pl.Trainer(**{**GPU, **options}, max_steps=9, callbacks=[callback])
    model = LitEDM(OneBadItem(), OneSample(), lr=0.1, lr_ramp_up_images=0)
    data = Digits(batch_size=32, val_images=32)
    with pytest.raises(
        NonFiniteLossError, match=r"not finite at step 3, first at noise level t=\d"
    ):
        trainer.fit(model, data)
    return trainer, model, data


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("every", "options", "told", "left"),
    [
        (1, {}, 4, 3),
        (2, {}, 4, 2),
        (50, {"log_every_n_steps": 5}, 5, None),
        (50, {"limit_val_batches": 1, "val_check_interval": 5}, 5, None),
    ],
)
def test_a_loss_that_is_not_finite_is_told_later_and_never_saved(
    every, options, told, left, tmp_path
):
    trainer, _, _ = fail(tmp_path, every, **options)
    assert trainer.global_step == told
    assert (tmp_path / "last.ckpt").exists() == (left is not None)
    if left is not None:
        saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
        assert saved["global_step"] == left
        assert all(
            saved[part]["denoiser.model.value"].isfinite()
            for part in ("state_dict", "current_model_state")
        )


@pytest.mark.gpu
def test_step_left_out_by_scaler_is_said_and_training_goes_on(
    tmp_path,
):
    _, model, data = fail(tmp_path, 2, precision="16-mixed")
    net = model.denoiser.model
    assert net.value.isfinite()
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 2
    net.good = math.inf
    # The second fit copies the module for its average, and no event of CUDA can be copied.
    trainer = pl.Trainer(**GPU, precision="16-mixed", max_steps=2, enable_checkpointing=False)
    trainer.fit(model, data)
    assert trainer.global_step == 2


@pytest.mark.gpu
def test_a_stopwatch_of_a_gpu_reads_seconds_and_begins_anew():
    watch = Stopwatch(torch.device("cuda"))
    with watch.running():
        time.sleep(0.05)
    # Events count milliseconds: 50 of them or more.
    assert 0.04 < watch.read_and_reset() < 25
    assert watch.read_and_reset() == 0


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_repeats_the_whole_one(tmp_path):
    def run(steps, ckpt_path=None):
        torch.manual_seed(0)
        folder = tmp_path / f"{steps} {ckpt_path is None}"
        # The first part ends within an epoch.
        short = {**GPU, "max_steps": steps, "limit_train_batches": 3}
        trainer = pl.Trainer(**short, callbacks=[LastCheckpoint(dirpath=str(folder))])
        model = LitICT(net(dropout=0.3), STF(8), lr=0.01, ema_decay=0.9)
        trainer.fit(model, Digits(batch_size=8), ckpt_path=ckpt_path)
        return torch.load(folder / "last.ckpt", weights_only=False)

    run(2)
    whole, resumed = run(4), run(4, tmp_path / "2 True" / "last.ckpt")
    for part in ("state_dict", "current_model_state", "averaging_state"):
        assert whole[part].keys() == resumed[part].keys()
        for name, value in whole[part].items():
            # Kernels may add in another order each time. Other masks or images would change a weight by some lr.
            torch.testing.assert_close(resumed[part][name], value, rtol=0, atol=1e-4, msg=name)
    assert resumed["averaging_state"]["n_averaged"].item() == 4
