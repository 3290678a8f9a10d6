"""Trainings of a few steps that signals cut short at a chosen moment, and what their checkpoints hold."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger

from lit_knn.callbacks import LastCheckpoint
from lit_knn.commands.trainer import Trainer
from lit_knn.common.tables import read_rows
from lit_knn.data import Digits
from lit_knn.estimators import KNN, OneSample
from lit_knn.modules import LitEDM, LitICT
from lit_knn.nets import UNet
from lit_knn.sampling.solvers import euler_step

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def net():
    torch.manual_seed(0)
    return UNet(1, channels=4, multipliers=(1,), blocks=1, dropout=0.2)


def ict(**options):
    options = {"lr": 1e-2, "ema_decay": 0.5, "total_steps": 16, "s1": 40, **options}
    return LitICT(net(), KNN(k=16, n=4), euler_step, **options)


def edm(**options):
    return LitEDM(
        net(),
        OneSample(),
        lr=1e-2,
        **{"lr_ramp_up_images": 300, "ema_half_life_images": 90, **options},
    )


class At(pl.Callback):
    """Does something once, on one rank, at a step and a moment: the name of a hook."""

    rank = 0

    def __init__(self, step, hook, action):
        self.step, self.action = step, action
        setattr(self, hook, self._act)

    def _act(self, trainer, *_):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.step = None
            self.action()


def interrupt(signum=signal.SIGINT):
    signal.raise_signal(signum)


def fit(folder, model, steps, ckpt_path=None, at=None, every=100, **options):
    """Train as the command line does, with four batches an epoch; return the exit status and the last checkpoint."""
    callbacks = [
        LastCheckpoint(every),
        *options.pop("callbacks", ()),
        *([] if at is None else [at]),
    ]
    logger = options.pop("logger", None) or CSVLogger(
        folder, name=None, version="run", flush_logs_every_n_steps=1
    )
    often = {
        "limit_train_batches": 4,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
    }
    options = {
        "default_root_dir": folder,
        "logger": logger,
        "callbacks": callbacks,
        **QUIET,
        **often,
        **options,
    }
    data, status = options.pop("data", None) or Digits(batch_size=40, val_images=32), 0
    trainer = Trainer(max_steps=steps, **options)
    try:
        trainer.fit(model, data, ckpt_path=ckpt_path)
    except SystemExit as stop:
        status = stop.code
    return status, Path(folder) / "run" / "checkpoints" / "last.ckpt"


def tensors(content, name=""):
    """All numbers of a checkpoint by the names of their places, except times, paths and the packages' versions."""
    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {
            n: value for key, inner in items for n, value in tensors(inner, f"{name}/{key}").items()
        }
    return {name: content}


def load(path):
    return torch.load(path, weights_only=True)


def state(path):
    """Read what a resumed run must share with the uninterrupted one: weights, averages, optimiser and counts."""
    checkpoint = load(path)
    kept = (
        "state_dict",
        "current_model_state",
        "averaging_state",
        "optimizer_states",
        "global_step",
        "images_seen",
    )
    return tensors({name: checkpoint[name] for name in (*kept, "batches_done", "epoch")})


def assert_same(path, other):
    assert_same_numbers(state(path), state(other))


def assert_same_numbers(ours, theirs):
    """Compare what `tensors` returned."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = (
            torch.equal(value, theirs[name])
            if isinstance(value, torch.Tensor)
            else value == theirs[name]
        )
        assert same, name


def validations(*folders):
    """`val/loss` by step, from the logs of all parts of a run."""
    rows = [row for folder in folders for row in read_rows(Path(folder) / "run" / "metrics.csv")]
    return {int(row["step"]): row["val/loss"] for row in rows if row.get("val/loss")}


class KilledAfter(pl.Callback):
    """Sends a signal to one rank some seconds after its training began: at any moment, also inside a step."""

    def __init__(self, seconds: float, signum: int, rank: int = 0) -> None:
        self.seconds, self.signum, self.rank = seconds, signum, rank

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == self.rank:
            timer = threading.Timer(self.seconds, os.kill, (os.getpid(), self.signum))
            timer.daemon = True
            timer.start()


class KilledAt(At):
    """Sends a signal to one rank at a step and a moment."""

    def __init__(self, step: int, hook: str, signum: int, rank: int = 0) -> None:
        super().__init__(step, hook, lambda: os.kill(os.getpid(), signum))
        self.rank = rank


def killed(kind, **options):
    """The configuration of one of these callbacks."""
    return {"class_path": f"tests.interrupted_runs.{kind}", "init_args": options}


@contextlib.contextmanager
def file_size_limit(limit):
    """A full disk, as far as a process can tell: files cannot grow beyond `limit` bytes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
