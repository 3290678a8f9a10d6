"""On a GPU, training waits for the device only at logs; checks speak there, and no checkpoint follows a failure."""

import math
from contextlib import ExitStack

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.callbacks import LastCheckpoint, PowerAverages, StepProgressBar
from lit_knn.common.deferred_checks import DeferredChecks
from lit_knn.common.errors import InputError, NonFiniteLossError
from lit_knn.data import Digits
from lit_knn.estimators import (
    KNN,
    STF,
    Exact,
    MonteCarlo,
    OneSample,
    SubspaceKNN,
    Switched,
    TopK,
    UniformSNIS,
    Wiener,
)
from lit_knn.index import TorchIndex
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.averaging import MovingAverage
from lit_knn.nets import DDPMpp
from tests.networks import write_start
from tests.short_training import TRAINER

ESTIMATORS = {
    "Exact": Exact,
    "KNN": lambda: KNN(64, 16),
    "KNN with source": lambda: KNN(64, 16, include_source=True),
    "MonteCarlo": lambda: MonteCarlo(16),
    "STF": lambda: STF(16),
    "SubspaceKNN": lambda: SubspaceKNN(32, n=16),
    "Switched": lambda: Switched(OneSample(), STF(16), 1.0),
    "TopK": lambda: TopK(16),
    "UniformSNIS": lambda: UniformSNIS(16),
    "Wiener": lambda: Wiener(32),
}
GPU = {**TRAINER, "accelerator": "gpu", "devices": 1}
# Without this, a fit with no callback for checkpoints leaves them in the current folder.
UNSAVED = {**GPU, "enable_checkpointing": False}


def net(**options):
    return DDPMpp(image_size=8, in_channels=1, channels=16, multipliers=[1], blocks=1, attention_at=[], **options)


class OneNumber(nn.Module):
    """A network of one number, whose output is not finite after `call` calls."""

    def __init__(self, call=math.inf, num_classes=0):
        super().__init__()
        self.num_classes = num_classes
        self.value, self.call, self.calls = nn.Parameter(torch.tensor(0.3)), call, 0

    def forward(self, z_scaled, noise_label, class_label=None, augment_label=None):
        self.calls += 1
        output = self.value.expand_as(z_scaled)
        return output * math.nan if self.calls > self.call else output


class Recorded(pl.Callback):
    """Records all that happens from the start of one step to the start of another."""

    def __init__(self, stand_in, first, last):
        self.stand_in, self.first, self.last = stand_in, first, last
        self.recorder, self.seen = ExitStack(), None

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.first and self.seen is None:
            self.seen = self.recorder.enter_context(self.stand_in.record())
        elif trainer.global_step == self.last:
            self.recorder.close()


@pytest.mark.parametrize(
    ("kind", "options", "net_options", "trainer_options"),
    [
        (LitICT, {}, {"dropout": 0.1}, {}),
        pytest.param(LitEDM, {}, {"dropout": 0.1}, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        (LitEDM, {"augmentation": GeometricAugmentation(0.4)}, {"augment_dim": 9}, {}),
        # The step is that of LitEDM, but for the output of the network.
        pytest.param(
            LitFlow, {"augmentation": GeometricAugmentation(0.4)}, {"augment_dim": 9}, {}, marks=pytest.mark.slow
        ),
        (LitICT, {"class_conditional": True}, {"num_classes": 10}, {"precision": "bf16-mixed"}),
    ],
)
def test_no_step_between_two_logs_waits(stand_in, kind, options, net_options, trainer_options, tmp_path):
    recorded = Recorded(stand_in, 2, 7)
    callbacks = [recorded, StepProgressBar(), LastCheckpoint(dirpath=str(tmp_path)), PowerAverages()]
    shown = {"enable_progress_bar": True, "log_every_n_steps": 8, "default_root_dir": tmp_path}
    shown["limit_train_batches"] = 5  # steps 2 to 7 hold the end of an epoch
    trainer = pl.Trainer(**{**GPU, **shown, **trainer_options}, max_steps=8, callbacks=callbacks)
    trainer.fit(kind(net(**net_options), OneSample(), **options), Digits(batch_size=16))
    assert recorded.seen.ops > 0
    assert recorded.seen.syncs == 0, recorded.seen.report()
    assert trainer.current_epoch > 0


def test_no_step_of_consistency_tuning_waits(stand_in, tmp_path):
    # In the first stage some levels r are 0 and some are not.
    recorded = Recorded(stand_in, 2, 5)
    trainer = pl.Trainer(**{**UNSAVED, "max_steps": 6, "log_every_n_steps": 8}, callbacks=[recorded])
    model = LitECT(KNN(64, 16), write_start(tmp_path / "start.ckpt", net()), net(dropout=0.1), stage_steps=3)
    trainer.fit(model, Digits(batch_size=16, index=TorchIndex()))
    assert recorded.seen.ops > 0
    assert recorded.seen.syncs == 0, recorded.seen.report()


@pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)
def test_no_estimator_makes_a_step_wait(stand_in, make):
    recorded = Recorded(stand_in, 2, 4)
    trainer = pl.Trainer(**{**UNSAVED, "max_steps": 5, "log_every_n_steps": 5}, callbacks=[recorded])
    trainer.fit(LitEDM(OneNumber(), make()), Digits(batch_size=16, index=TorchIndex()))
    assert recorded.seen.ops > 0
    assert recorded.seen.syncs == 0, recorded.seen.report()


@pytest.mark.parametrize("make", [Exact, lambda: KNN(32, 16), lambda: STF(16), ESTIMATORS["Switched"]])
def test_no_class_makes_a_step_wait(stand_in, make):
    recorded = Recorded(stand_in, 2, 4)
    trainer = pl.Trainer(**{**UNSAVED, "max_steps": 5, "log_every_n_steps": 5}, callbacks=[recorded])
    trainer.fit(LitICT(OneNumber(num_classes=10), make(), class_conditional=True), Digits(batch_size=16))
    assert recorded.seen.syncs == 0, recorded.seen.report()


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "logs", "told", "left"), [(1, 50, 4, 3), (2, 50, 4, 2), (50, 5, 5, None)])
def test_a_loss_that_is_not_finite_is_told_later_and_never_saved(every, logs, told, left, tmp_path):
    last = LastCheckpoint(every, dirpath=str(tmp_path))
    trainer = pl.Trainer(**{**GPU, "max_steps": 9, "log_every_n_steps": logs}, callbacks=[last])
    # The first call is the trial of `setup`.
    model = LitEDM(OneNumber(call=4), OneSample(), lr=0.1, lr_ramp_up_images=0)
    with pytest.raises(NonFiniteLossError, match=r"not finite at step 3, first at noise level t=\d"):
        trainer.fit(model, Digits(batch_size=32))
    assert trainer.global_step == told
    if left is None:
        assert not (tmp_path / "last.ckpt").exists()
        return
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == left
    assert all(saved[part]["denoiser.model.value"].isfinite() for part in ("state_dict", "current_model_state"))


@pytest.mark.gpu
def test_a_validation_tells_what_is_not_finite():
    options = {**UNSAVED, "limit_val_batches": 1, "val_check_interval": 5}
    trainer = pl.Trainer(**options, max_steps=9)
    with pytest.raises(NonFiniteLossError, match="not finite at step 3"):
        trainer.fit(LitEDM(OneNumber(call=4), OneSample(), lr_ramp_up_images=0), Digits(batch_size=32, val_images=32))
    assert trainer.global_step == 5


@pytest.mark.gpu
def test_a_step_that_the_scaler_of_gradients_leaves_out_is_told_before_a_checkpoint_and_once(tmp_path):
    options = {**GPU, "precision": "16-mixed", "log_every_n_steps": 50}
    trainer = pl.Trainer(**options, max_steps=9, callbacks=[LastCheckpoint(2, dirpath=str(tmp_path))])
    net = OneNumber(call=4)
    model, data = LitEDM(net, OneSample(), lr=0.1, lr_ramp_up_images=0), Digits(batch_size=32)
    with pytest.raises(NonFiniteLossError, match=r"not finite at step 3, first at noise level t=\d"):
        trainer.fit(model, data)
    assert net.value.isfinite()
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 2
    net.call = math.inf
    trainer = pl.Trainer(**options, max_steps=2, enable_checkpointing=False)
    trainer.fit(model, data)
    assert trainer.global_step == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [LitICT, LitEDM])
def test_a_resumed_run_on_a_gpu_repeats_the_whole_one(kind, tmp_path):
    def run(steps, ckpt_path=None):
        torch.manual_seed(0)
        options = {"lr_ramp_up_images": 0} if kind is LitEDM else {"ema_decay": 0.9}
        folder = tmp_path / f"{steps} {ckpt_path is None}"
        trainer = pl.Trainer(**{**GPU, "max_steps": steps}, callbacks=[LastCheckpoint(dirpath=str(folder))])
        model = kind(OneNumber(), OneSample(), lr=0.1, **options)
        trainer.fit(model, Digits(batch_size=300), ckpt_path=ckpt_path)
        return folder / "last.ckpt"

    whole, resumed = (torch.load(path, weights_only=False) for path in (run(8), run(8, run(3))))
    for part in ("state_dict", "current_model_state", "averaging_state"):
        assert whole[part].keys() == resumed[part].keys()
        assert all(torch.equal(value, resumed[part][name]) for name, value in whole[part].items()), part
    assert resumed["averaging_state"]["n_averaged"].item() == 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("t", -2.0, "OneSample: t must be finite and above 0, got -2.0 at step 7"),
        ("t", 1e300, r"above 0 and between 1.18e-38 and 3.4e\+38, got 1e\+300 at step 7"),
        ("z", math.nan, "OneSample: z holds a value that is not finite at step 7"),
        ("x_source", math.inf, "OneSample: x_source holds a value that is not finite at step 7"),
    ],
)
def test_the_first_bad_value_of_an_estimator_is_told_when_asked(where, value, message):
    checks, ones = DeferredChecks(), torch.ones(3, 1, 4, 4, device="cuda")
    good = {"z": ones, "t": torch.ones(3, dtype=torch.float64, device="cuda"), "x_source": ones}
    for step, args in ((6, good), (7, {**good, where: good[where].clone()}), (8, {**good, "t": -good["t"]})):
        if step == 7:
            args[where].view(3, -1)[1:] = value
        with checks.collect(step):
            OneSample().posterior_mean(**args)
    for _ in range(2):  # It stays noted, so that nothing is saved after it.
        with pytest.raises(InputError, match=message):
            checks.raise_first()


def test_a_call_of_an_estimator_waits_once_and_a_noted_one_not(stand_in):
    z, checks = torch.ones(3, 1, 4, 4, device="cuda"), DeferredChecks()
    for t in (0.5, torch.full((3,), 0.5, device="cuda")):
        with stand_in.record() as seen:
            OneSample().posterior_mean(z, t, z)
        assert seen.syncs == 1, seen.report()
        with stand_in.record() as seen, checks.collect(1):
            OneSample().posterior_mean(z, t, z)
        assert seen.syncs == 0, seen.report()
    with stand_in.record() as seen:
        checks.raise_first()
    assert seen.syncs == 1


class Weights(nn.Module):
    """Many weights, and a count in a buffer."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3, 2)) for _ in range(50))
        self.register_buffer("count", torch.tensor(0))


@pytest.mark.gpu
def test_the_moving_average_is_that_of_float64():
    model = Weights().cuda()
    decays = iter([0.5, 0.99, 0.2])
    average = MovingAverage(model, torch.device("cuda"), lambda: next(decays))
    expected = None
    for decay in (0.0, 0.5, 0.99, 0.2):  # the first update copies
        for weight in model.weights:
            torch.nn.init.normal_(weight)
        model.count += 1
        now = torch.stack([weight.detach().cpu().double() for weight in model.weights])
        expected = now if expected is None else decay * expected + (1 - decay) * now
        average.update_parameters(model)
    seen = torch.stack([weight.detach().cpu().double() for weight in average.module.weights])
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    assert average.module.count.item() == average.n_averaged.item() == 4
