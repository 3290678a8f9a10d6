"""A run that is interrupted and resumed is the uninterrupted run, and its options hold or are refused."""

import signal

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.common.tables import read_rows
from lit_knn.data import Digits
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitICT
from lit_knn.nets import UNet
from lit_knn.runs.resumption import requeued_checkpoint
from lit_knn.sampling.solvers import euler_step
from tests.interrupted_runs import QUIET, At, assert_same, edm, fit, ict, interrupt, net, validations
from tests.ranks import run_ranks

MOMENTS = ["on_train_batch_start", "on_train_batch_end"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Nine steps of each model without an interruption; an epoch has four batches."""
    runs = {}

    def of(make, **options):
        key = make, *options.items()
        if key not in runs:
            folder = tmp_path_factory.mktemp("whole")
            runs[key] = fit(folder, make(), 9, **options)[1]
        return runs[key]

    return of


def broken_off():
    raise KeyboardInterrupt


@pytest.mark.parametrize(("make", "action"), [(ict, broken_off), (edm, interrupt)])
def test_a_run_interrupted_in_a_batch_is_the_same_after_two_resumptions(make, action, whole, tmp_path):
    # Validations fall between the interruptions, and the counts of batches must be right for them, too.
    _, first = fit(tmp_path / "1", make(), 9, at=At(3, "on_after_backward", action))
    _, second = fit(tmp_path / "2", make(), 6, first)
    _, third = fit(tmp_path / "3", make(), 9, second)
    assert torch.load(first, weights_only=True)["global_step"] == (4 if action is interrupt else 3)
    assert_same(third, whole(make))
    expected = validations(whole(make).parents[2])
    assert len(expected) == 3
    assert validations(*(tmp_path / n for n in "123")) == expected


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_the_run_after_the_batch_at_every_moment(moment, whole, tmp_path):
    status, path = fit(tmp_path / "a", ict(), 9, at=At(4, moment, lambda: interrupt(signal.SIGTERM)))
    assert status == 128 + signal.SIGTERM
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == (4 if moment == "on_train_batch_end" else 5)
    _, resumed = fit(tmp_path / "b", ict(), 9, path)
    assert_same(resumed, whole(ict))


def test_a_signal_in_the_optimisers_step_does_not_cut_the_step_in_two(tmp_path):
    class Slow(torch.optim.SGD):
        """Gets a signal between two parameters."""

        at = None

        def step(self, closure):
            loss = closure()
            weights = [weight for group in self.param_groups for weight in group["params"]]
            for number, weight in enumerate(weights):
                if len(weights) // 2 == number and Slow.at == 0:
                    interrupt()
                weight.data.sub_(weight.grad, alpha=1e-3)
            Slow.at = None if Slow.at is None else Slow.at - 1
            return loss

    def make():
        model = ict()
        model.configure_optimizers = lambda: Slow(model.parameters(), lr=1e-3)
        return model

    _, whole = fit(tmp_path / "whole", make(), 5)
    Slow.at = 2
    status, path = fit(tmp_path / "a", make(), 5)
    assert status == 130
    Slow.at = None
    assert_same(fit(tmp_path / "b", make(), 5, path)[1], whole)


def test_accumulated_gradients_are_not_lost(whole, tmp_path):
    # The signal comes in the first batch of two, so the run goes on to the second.
    status, path = fit(tmp_path / "a", ict(), 9, at=At(3, "on_train_batch_start", interrupt), accumulate_grad_batches=2)
    assert status == 130
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["global_step"], checkpoint["batches_done"]) == (4, 8)
    _, resumed = fit(tmp_path / "b", ict(), 9, path, accumulate_grad_batches=2)
    assert_same(resumed, whole(ict, accumulate_grad_batches=2))


@pytest.mark.parametrize(("step", "hook"), [(3, "on_validation_start"), (9, "on_validation_batch_end")])
def test_a_run_interrupted_in_a_validation_goes_on_after_it(step, hook, whole, tmp_path):
    status, path = fit(tmp_path / "a", ict(), 9, at=At(step, hook, interrupt))
    assert status == 130
    status, resumed = fit(tmp_path / "b", ict(), 9, path)
    assert status == 0
    # After the last step nothing is left, and nothing is logged.
    assert_same(resumed if step < 9 else path, whole(ict))
    parts = [tmp_path / "a", tmp_path / "b"] if step < 9 else [tmp_path / "a"]
    # `validate` measures what the interrupted one did not.
    expected = validations(whole(ict).parents[2])
    assert validations(*parts) == {at: value for at, value in expected.items() if at != step - 1}


def test_a_finished_validation_is_not_repeated(whole, tmp_path):
    _, path = fit(tmp_path / "a", ict(), 9, at=At(6, "on_train_batch_start", broken_off))
    fit(tmp_path / "b", ict(), 9, path)
    assert list(validations(tmp_path / "b")) == [8]


def test_the_first_signal_is_not_the_second_which_launchers_send(tmp_path):
    # Torchrun sends a Ctrl-C once more to its processes, which have got it from the terminal.
    def twice():
        interrupt()
        interrupt()

    status, path = fit(tmp_path, ict(), 9, at=At(2, "on_after_backward", twice))
    assert status == 130
    assert torch.load(path, weights_only=True)["global_step"] == 3


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_that_one_rank_alone_got_ends_all_after_the_same_batch(signalled, tmp_path):
    codes, errors = run_ranks("tests.signal_probe", tmp_path, signalled, ranks=2)
    assert codes == [0, 0], errors
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]


def test_an_error_inside_a_step_leaves_the_checkpoint_before_it(tmp_path):
    def fail(optimizer, *_):
        if next(iter(optimizer.state.values()))["step"] == 5:
            raise RuntimeError("on purpose")

    model = ict()
    optimizer = model.configure_optimizers
    model.configure_optimizers = lambda: [made := optimizer(), made.register_step_post_hook(fail)][0]
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, model, 9)
    # The one around the validation at step 3. The averaged weights of step 5 are missing.
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == 3


def test_every_validation_has_the_same_noise(tmp_path):
    # So small a learning rate changes no weight.
    fit(tmp_path, ict(lr=1e-30, s0=10, s1=10), 6)
    losses = [row["val/loss"] for row in read_rows(tmp_path / "run" / "metrics.csv") if row["val/loss"]]
    assert len(losses) == 2
    assert losses[0] == losses[1]


class Decaying(LitICT):
    """Halves the learning rate after each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_scheduler_goes_on_where_it_was(tmp_path):
    def model():
        return Decaying(net(), OneSample(), euler_step, lr=0.1, total_steps=16)

    path = fit(tmp_path / "a", model(), 2)[1]
    path = fit(tmp_path / "b", model(), 3, path)[1]
    (group,) = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == pytest.approx(0.1 / 2**3)


def test_the_options_of_the_optimiser_hold(tmp_path):
    _, path = fit(tmp_path / "a", ict(lr=1e-2), 2)
    _, resumed = fit(tmp_path / "b", ict(lr=0.03), 3, path)
    (group,) = torch.load(resumed, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 0.03
    # The moments of the optimiser are those of the checkpoint.
    states = [torch.load(p, weights_only=True)["optimizer_states"][0]["state"][0] for p in (path, resumed)]
    assert [state["step"].item() for state in states] == [2, 3]


def other(kind, schedule=None):
    """A model with another optimiser, with or without a schedule."""
    model = LitICT(net(), OneSample(), euler_step, lr=0.1, total_steps=16)

    def configured():
        optimizer = kind(model.parameters(), lr=0.1)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    model.configure_optimizers = configured
    return model


def test_the_state_of_another_optimiser_or_schedule_is_not_taken_over(tmp_path):
    def half(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    _, path = fit(tmp_path / "a", other(torch.optim.RAdam), 2)
    for number, (kind, schedule, said) in enumerate(
        [
            (torch.optim.SGD, None, "optimizer RAdam, not of SGD"),
            (torch.optim.Adam, None, "optimizer RAdam, not of Adam"),
            (torch.optim.RAdam, half, "lr_scheduler none, not of ExponentialLR"),
        ]
    ):
        with pytest.raises(InputError, match=f"the checkpoint has the state of {said}: give the same, or start a new"):
            fit(tmp_path / f"b{number}", other(kind, schedule), 3, path)
        assert not list((tmp_path / f"b{number}").rglob("*.ckpt"))
    _, scheduled = fit(tmp_path / "c", other(torch.optim.RAdam, half), 2)
    with pytest.raises(InputError, match="lr_scheduler ExponentialLR, not of none"):
        fit(tmp_path / "d", other(torch.optim.RAdam), 3, scheduled)


def test_a_schedule_that_ends_before_the_training_is_refused_at_its_start(tmp_path):
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)

    with pytest.raises(InputError, match="total_steps 5: OneCycleLR would end before the 6 steps of the training"):
        fit(tmp_path, other(torch.optim.RAdam, cycle), 6)
    assert fit(tmp_path, other(torch.optim.RAdam, cycle), 4)[0] == 0


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("--seed_everything 0, not 1", {"model": {"seed": 1}}),
        ("--data.batch_size 40, not 20", {"data": {"batch_size": 20}}),
        ("--trainer.accumulate_grad_batches 1, not 2", {"accumulate_grad_batches": 2}),
        ("number of images of the data 1797, not 3594", {"data": {"hflip": True}}),
        (r"ranks \(.*\) 2, not 1", {}),
    ],
)
def test_options_that_change_the_meaning_of_the_counts_are_refused(option, change, tmp_path):
    _, path = fit(tmp_path / "a", ict(), 2)
    if not change:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["run"]["ranks"] = 2
        torch.save(checkpoint, path)
    data = Digits(**{"batch_size": 40, **change.get("data", {})})
    options = {name: value for name, value in change.items() if name not in ("model", "data")}
    trainer = Trainer(max_steps=4, logger=False, enable_checkpointing=False, **QUIET, **options)
    with pytest.raises(InputError, match=option):
        trainer.fit(ict(**change.get("model", {})), data, ckpt_path=path)


class Inverted(Digits):
    """As many images of the same shape, but other ones."""

    def load(self):
        images, labels = super().load()
        return 255 - images, labels


class Relabelled(Digits):
    """The same images with other labels."""

    def load(self):
        images, labels = super().load()
        return images, 9 - labels


def resume(path, data, model=None):
    trainer = Trainer(max_steps=2, logger=False, enable_checkpointing=False, **QUIET)
    trainer.fit(model or ict(), data, ckpt_path=path)
    return trainer.global_step


def test_other_images_or_labels_are_refused(tmp_path):
    _, path = fit(tmp_path / "a", ict(), 1)
    with pytest.raises(InputError, match=r"images with the hash [0-9a-f]{16}, not [0-9a-f]{16};"):
        resume(path, Inverted(batch_size=40))
    # Without classes the labels do not matter. A set in shards is the same set.
    assert resume(path, Relabelled(batch_size=40)) == 2
    assert resume(path, Digits(batch_size=40, sharded=True)) == 2

    def conditional():
        net = UNet(1, channels=4, multipliers=(1,), blocks=1, num_classes=10)
        return LitEDM(net, OneSample(), class_conditional=True)

    _, path = fit(tmp_path / "b", conditional(), 1)
    assert resume(path, Digits(batch_size=40), conditional()) == 2
    with pytest.raises(InputError, match="class labels with the hash"):
        resume(path, Relabelled(batch_size=40), conditional())


def test_a_job_that_slurm_queued_again_resumes_from_its_newest_checkpoint(tmp_path, monkeypatch):
    trainer = pl.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", enable_checkpointing=False)
    for number in (2, 9, 10):
        (tmp_path / f"hpc_ckpt_{number}.ckpt").touch()
    assert requeued_checkpoint(trainer) is None  # SLURM has not started this process.
    for name, value in {"JOB_ID": "77", "NTASKS": "1", "JOB_NAME": "a"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert requeued_checkpoint(trainer) == tmp_path / "hpc_ckpt_10.ckpt"


def test_slurms_signal_to_requeue_saves_between_two_batches(whole, tmp_path, monkeypatch):
    from pytorch_lightning.plugins.environments import SLURMEnvironment

    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/said\n")
    (commands / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    for name, value in {"JOB_ID": "77", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NTASKS": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    at = At(4, "on_after_backward", lambda: interrupt(signal.SIGUSR1))
    plugins = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    status, path = fit(tmp_path / "a", ict(), 9, at=at, plugins=plugins)
    assert (tmp_path / "said").read_text() == "requeue 77\n"
    # The run goes on until SLURM ends it.
    assert status == 0
    assert_same(path, whole(ict))
    (requeued,) = (tmp_path / "a").glob("hpc_ckpt_*.ckpt")
    assert torch.load(requeued, weights_only=True)["global_step"] == 5
    assert_same(fit(tmp_path / "b", ict(), 9, requeued)[1], whole(ict))
