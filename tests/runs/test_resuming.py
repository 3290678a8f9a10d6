"""A run that is interrupted and resumed is the uninterrupted run, and its options hold or are refused."""

import os
import signal
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.data import Digits, Latents
from lit_knn.data.autoencoders import PCA
from lit_knn.estimators import KNN, OneSample
from lit_knn.modules import LitEDM, LitMeanFlow, LitSCT
from lit_knn.modules.time_distributions import LogitNormalTimes
from lit_knn.nets import UNet
from lit_knn.runs.optimiser import ResumedOptimiser
from tests.interrupted_runs import (
    QUIET,
    At,
    assert_same,
    edm,
    fit,
    ict,
    interrupt,
    load,
    validations,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`whole(ict)` trains nine steps of a model without an interruption, once; an epoch has four batches."""
    return cache(
        lambda make, **options: fit(tmp_path_factory.mktemp("whole"), make(), 9, **options)[1]
    )


def broken_off():
    raise KeyboardInterrupt


def twice():
    # Torchrun sends a Ctrl-C once more to its processes, which have got it from the terminal.
    interrupt()
    interrupt()


def sigterm():
    interrupt(signal.SIGTERM)


def mean_flow(tangent=None, **options):
    torch.manual_seed(0)
    net = UNet(1, channels=4, multipliers=(1,), blocks=1, dropout=0.2, augment_dim=8)
    options |= {"lr": 1e-2, "lr_ramp_up_images": 300, "ema_half_life_images": 90}
    return LitMeanFlow(net, KNN(k=16, n=4), tangent or OneSample(), **options)


def improved_mean_flow():
    """A mean flow with the network's velocity, lower times and a separate derivative."""
    lower_times = LogitNormalTimes(-4.0, 1.6)
    return mean_flow("network", lower_times=lower_times, separate_tangent_pass=True)


def sct():
    torch.manual_seed(0)
    net = UNet(1, channels=4, multipliers=(1,), blocks=1, dropout=0.2)
    # The warm-up ends within the run.
    return LitSCT(KNN(k=16, n=4), net=net, lr=1e-2, ema_decay=0.5, tangent_warmup_steps=7)


@pytest.mark.parametrize(
    ("make", "action"),
    [
        (ict, broken_off),
        (edm, interrupt),
        pytest.param(sct, broken_off, marks=pytest.mark.slow),
        pytest.param(mean_flow, interrupt, marks=pytest.mark.slow),
        pytest.param(improved_mean_flow, interrupt, marks=pytest.mark.slow),
    ],
)
def test_run_interrupted_in_a_batch_is_equal_after_two_resumes(make, action, whole, tmp_path):
    # Validations fall between the interruptions, and the counts of batches must be right for them, too.
    _, first = fit(tmp_path / "1", make(), 9, at=At(3, "on_after_backward", action))
    _, second = fit(tmp_path / "2", make(), 6, first)
    _, third = fit(tmp_path / "3", make(), 9, second)
    assert load(first)["global_step"] == (4 if action is interrupt else 3)
    assert_same(third, whole(make))
    assert validations(*(tmp_path / n for n in "123")) == validations(whole(make).parents[2])
    # A finished validation is not repeated.
    assert [list(validations(tmp_path / n)) for n in "123"] == [[2], [5], [8]]


def test_an_error_in_the_last_batch_of_an_epoch_shortens_no_run(tmp_path):
    _, whole = fit(tmp_path / "whole", ict(), -1, max_epochs=3)
    _, first = fit(
        tmp_path / "a", ict(), -1, at=At(7, "on_after_backward", broken_off), max_epochs=3
    )
    assert load(first)["global_step"] == 7
    assert_same(fit(tmp_path / "b", ict(), -1, first, max_epochs=3)[1], whole)
    assert validations(tmp_path / "a", tmp_path / "b") == validations(tmp_path / "whole")


def test_a_run_on_the_same_few_batches_goes_on_with_the_next_one(tmp_path):
    options = {"limit_train_batches": None, "overfit_batches": 4}
    _, whole = fit(tmp_path / "whole", ict(), 6, **options)
    _, first = fit(tmp_path / "a", ict(), 6, at=At(2, "on_train_batch_end", interrupt), **options)
    assert_same(fit(tmp_path / "b", ict(), 6, first, **options)[1], whole)


@pytest.mark.parametrize(
    ("step", "hook", "action", "ends_at", "accumulate"),
    [
        (4, "on_train_batch_start", sigterm, 5, 1),
        (4, "on_train_batch_end", sigterm, 4, 1),
        (3, "on_after_backward", twice, 4, 1),
        (3, "on_validation_start", interrupt, 3, 1),
        (9, "on_validation_batch_end", interrupt, 9, 1),
        # The signal comes in the first batch of two, whose gradients would be lost: the run goes on to the second.
        (3, "on_train_batch_start", interrupt, 4, 2),
        # After three batches of two a validation comes inside a step, which nothing has saved.
        (1, "on_validation_start", interrupt, 2, 2),
    ],
)
def test_a_signal_ends_the_run_between_two_steps(
    step, hook, action, ends_at, accumulate, whole, tmp_path
):
    options = {"accumulate_grad_batches": accumulate} if accumulate > 1 else {}
    expected = whole(ict, **options)
    status, path = fit(tmp_path / "a", ict(), 9, at=At(step, hook, action), **options)
    assert status == 128 + (signal.SIGTERM if action is sigterm else signal.SIGINT)
    checkpoint = load(path)
    assert (checkpoint["global_step"], checkpoint["batches_done"]) == (
        ends_at,
        ends_at * accumulate,
    )
    status, resumed = fit(tmp_path / "b", ict(), 9, path, **options)
    assert status == 0
    # After the last step nothing is left, and nothing is logged.
    assert_same(resumed if ends_at < 9 else path, expected)
    measured = validations(*([tmp_path / "a", tmp_path / "b"] if ends_at < 9 else [tmp_path / "a"]))
    # An interrupted validation is not made up for: `validate` measures it.
    missing = step - 1 if "validation" in hook and accumulate == 1 else None
    assert measured == {
        at: value for at, value in validations(expected.parents[2]).items() if at != missing
    }


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path, monkeypatch):
    def end(status):
        raise RuntimeError(f"ended with {status}")

    monkeypatch.setattr("lit_knn.runs.interruption.SECONDS_BETWEEN_TWO", -1.0)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(RuntimeError, match="ended with 130"):
        fit(tmp_path, ict(), 9, at=At(3, "on_after_backward", twice))


def test_validation_inside_a_step_leaves_earlier_checkpoint(tmp_path):
    def fail():
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(
            tmp_path,
            ict(),
            9,
            every=1,
            at=At(1, "on_before_optimizer_step", fail),
            accumulate_grad_batches=2,
        )
    # The third batch is not counted: its gradients are in no checkpoint.
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["batches_done"] == 2


def test_an_error_inside_a_step_leaves_the_checkpoint_before_it(tmp_path):
    def fail(optimizer, *_):
        if next(iter(optimizer.state.values()))["step"] == 5:
            raise RuntimeError("on purpose")

    model = ict()
    optimizer = model.configure_optimizers
    model.configure_optimizers = lambda: [made := optimizer(), made.register_step_post_hook(fail)][
        0
    ]
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, model, 9)
    # The one around the validation at step 3. The averaged weights of step 5 are missing.
    assert load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 3


def other(kind, schedule=None, frequency=1):
    """A model with another optimiser, with or without a schedule, which takes its steps at a frequency."""
    model = ict()

    def configured():
        optimizer = kind(model.parameters(), lr=0.1)
        if schedule is None:
            return optimizer
        often = {"interval": "step", "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **often}}

    model.configure_optimizers = configured
    return model


def test_optimiser_options_hold_and_other_state_is_left_out(tmp_path):
    def half(optimizer):
        return ExponentialLR(optimizer, 0.5)

    _, path = fit(tmp_path / "a", ict(lr=1e-2), 2)
    _, resumed = fit(tmp_path / "b", ict(lr=0.03), 3, path)
    states = [load(p)["optimizer_states"][0] for p in (path, resumed)]
    assert states[1]["param_groups"][0]["lr"] == 0.03
    # The moments of the optimiser are those of the checkpoint.
    assert [state["state"][0]["step"].item() for state in states] == [2, 3]
    RAdam = torch.optim.RAdam
    _, plain = fit(tmp_path / "plain", other(RAdam), 2)
    _, halved = fit(tmp_path / "halved", other(RAdam, half), 2)
    lengths = {steps: partial(OneCycleLR, max_lr=0.1, total_steps=steps) for steps in (2, 3)}
    _, cycled = fit(tmp_path / "cycled", other(RAdam, lengths[2]), 2)
    cosines = {steps: partial(CosineAnnealingLR, T_max=steps) for steps in (2, 3)}
    _, cosine = fit(tmp_path / "cosine", other(RAdam, cosines[2]), 2)
    for path, kind, schedule, said in (
        (plain, torch.optim.Adam, None, "optimizer RAdam, not of Adam"),
        (plain, RAdam, half, "lr_scheduler none, not of ExponentialLR"),
        (halved, RAdam, None, "lr_scheduler ExponentialLR, not of none"),
        # Lightning would go on with the old length.
        (
            cycled,
            RAdam,
            lengths[3],
            "lr_scheduler OneCycleLR of 2 steps, not of OneCycleLR of 3 steps",
        ),
        (
            cosine,
            RAdam,
            cosines[3],
            "lr_scheduler CosineAnnealingLR of 2 steps, not of CosineAnnealingLR of 3 steps",
        ),
    ):
        with pytest.raises(
            InputError,
            match=f"the checkpoint has the state of {said}: give the same, or start a new",
        ):
            fit(tmp_path / "refused", other(kind, schedule), 3, path)
        assert not list((tmp_path / "refused").rglob("*.ckpt"))
    _, resumed = fit(tmp_path / "resumed", other(partial(RAdam, weight_decay=0.2), half), 3, halved)
    (group,) = load(resumed)["optimizer_states"][0]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.1 / 2**3), 0.2)
    with pytest.raises(
        InputError, match=r"its schedule has initial_lr=0\.1, not 0\.3: give the same"
    ):
        fit(
            tmp_path / "refused", other(lambda weights, lr: RAdam(weights, lr=0.3), half), 3, halved
        )
    assert not list((tmp_path / "refused").rglob("*.ckpt"))


def test_schedule_ending_before_training_is_refused_at_start(tmp_path):
    def cycle(optimizer):
        return OneCycleLR(optimizer, 0.1, total_steps=5)

    with pytest.raises(
        InputError, match="total_steps 5: OneCycleLR would end before the 6 steps of the training"
    ):
        fit(tmp_path, other(torch.optim.RAdam, cycle), 6)
    assert fit(tmp_path, other(torch.optim.RAdam, cycle), 5)[0] == 0
    assert fit(tmp_path / "rare", other(torch.optim.RAdam, cycle, frequency=2), 6)[0] == 0


def test_a_resumed_schedule_keeps_its_momentum():
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], betas=(0.9, 0.999))
    trainer = SimpleNamespace(optimizers=[adam], lr_scheduler_configs=[])
    callback = ResumedOptimiser()
    callback.on_fit_start(trainer, None)
    trainer.lr_scheduler_configs = [SimpleNamespace()]
    adam.param_groups[0].update(lr=0.03, betas=(0.87, 0.999))  # as Lightning loads the checkpoint
    callback.on_train_start(trainer, None)
    assert adam.param_groups[0]["betas"] == (0.87, 0.999)


class Changed(Digits):
    """As many images of the same shape, but other ones; or the same images with other labels."""

    def __init__(self, images=None, labels=None):
        super().__init__(batch_size=40)
        self.changes = images, labels

    def load(self):
        pairs = zip(self.changes, super().load(), strict=True)
        return tuple(part if change is None else change - part for change, part in pairs)


class OfThisDevice(PCA):
    rounding = 0.0  # Latents of another device or number of threads have other last bits.

    def encode(self, images):
        return super().encode(images) * (1 + self.rounding)


def latents(scale, rounding=0.0):
    data = Latents(Digits(), OfThisDevice((1, 8, 8), scale), batch_size=40)
    data.autoencoder.rounding = rounding
    return data


def conditional():
    return LitEDM(
        UNet(1, channels=4, multipliers=(1,), blocks=1, num_classes=10),
        OneSample(),
        class_conditional=True,
    )


def resume(path, data=None, model=None, **options):
    trainer = Trainer(max_steps=2, logger=False, enable_checkpointing=False, **QUIET, **options)
    trainer.fit(model or ict(), data or Digits(batch_size=40), ckpt_path=path)
    return trainer.global_step


def test_changes_of_the_meaning_of_counts_are_refused(tmp_path):
    _, path = fit(tmp_path / "a", ict(), 1)
    _, of_classes = fit(tmp_path / "b", conditional(), 1)
    of_latents = fit(tmp_path / "c", ict(), 1, data=latents(0.5))[1]
    of_ranks, of_shards = tmp_path / "two.ckpt", tmp_path / "shards.ckpt"
    for file, own in ((of_ranks, {"ranks": 2}), (of_shards, {"shards": "0" * 16})):
        torch.save({**load(path), "run": {**load(path)["run"], **own}}, file)
    for checkpoint, said, options in (
        (path, "--seed_everything 0, not 1", {"model": ict(seed=1)}),
        (path, "--data.batch_size 40, not 20", {"data": Digits(batch_size=20)}),
        (path, "--trainer.accumulate_grad_batches 1, not 2", {"accumulate_grad_batches": 2}),
        (
            path,
            "number of images of the data 1797, not 3594",
            {"data": Digits(batch_size=40, hflip=True)},
        ),
        (
            path,
            r"images with the hash [0-9a-f]{16}, not [0-9a-f]{16};",
            {"data": Changed(images=255)},
        ),
        (
            of_classes,
            "class labels with the hash",
            {"data": Changed(labels=9), "model": conditional()},
        ),
        (
            of_latents,
            r"--data.autoencoder .*\"autoencoder.scale\": 0.5.*, not .*: 0.25",
            {"data": latents(0.25)},
        ),
        (of_ranks, r"ranks \(.*\) 2, not 1", {}),
        (
            of_shards,
            "images with the hash 0{16}, not",
            {"data": Digits(batch_size=40, sharded=True)},
        ),
    ):
        with pytest.raises(InputError, match=said):
            resume(checkpoint, **options)
    # Without classes the labels do not matter. A set in shards is the same set.
    assert resume(path, Changed(labels=9)) == 2
    assert resume(path, Digits(batch_size=40, sharded=True)) == 2
    assert resume(of_classes, model=conditional()) == 2
    assert resume(of_latents, latents(0.5, 1e-6)) == 2


def test_slurm_queues_a_job_again_between_two_batches(whole, tmp_path, monkeypatch):
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/said\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    job = {
        "JOB_ID": "77",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NTASKS": "1",
        "JOB_NAME": "a",
    }
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    at = At(4, "on_after_backward", lambda: interrupt(signal.SIGUSR1))
    plugins = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    status, path = fit(tmp_path / "a", ict(), 9, at=at, plugins=plugins)
    assert (tmp_path / "said").read_text() == "requeue 77\n"
    # The run goes on until SLURM ends it.
    assert status == 0
    assert_same(path, whole(ict))
    (requeued,) = (tmp_path / "a").glob("hpc_ckpt_*.ckpt")
    assert load(requeued)["global_step"] == 5
    assert_same(fit(tmp_path / "b", ict(), 9, requeued)[1], whole(ict))
