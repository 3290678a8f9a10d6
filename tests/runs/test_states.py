"""What callbacks, data and modules keep in a checkpoint is readable, or refused by name before the first step."""

import collections
import dataclasses
import datetime
import enum
import os
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.modules import LitEDM
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.states import explained, unreadable
from tests.command_lines import DEMO, TINY, refusal_of
from tests.interrupted_runs import edm, fit, load

ME = "tests.runs.test_states"
RULE = "numbers, text, tensors, or lists and dicts of these"


@dataclasses.dataclass
class Place:
    at: int = 3


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")

# A value, what its line calls it, and what the line says to give in its place.
REFUSED = [
    (np.float64(1), "numpy.float64", "float"),
    (np.float32(1), "numpy.float32", "float"),
    (np.int64(1), "numpy.int64", "int"),
    (np.bool_(True), "numpy.bool", "bool"),
    (np.str_("a"), "numpy.str_", "str"),
    (np.ones(3), "numpy.ndarray", "a list or a tensor"),
    (Path("a"), f"pathlib.{type(Path()).__name__}", "str"),
    (collections.defaultdict(list), "collections.defaultdict", "dict"),
    (Pair(1, 2), f"{ME}.Pair", "tuple"),
    (Colour.RED, f"{ME}.Colour", "int"),
    (Place(), f"{ME}.Place", RULE),
    (datetime.datetime(2024, 1, 1), "datetime.datetime", RULE),
    (lambda: 3, "function", RULE),
    (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", RULE),
]
READ = [
    *(None, 1, 1.5, float("nan"), "a", b"a", 1j, True, (1, 2), {1: "a"}, {1, 2}),
    *(torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.float32, torch.device("cpu")),
    *(torch.Size([1]), collections.Counter("aab"), collections.OrderedDict(a=1)),
]


@pytest.mark.parametrize(
    ("value", "kind", "instead"), REFUSED, ids=lambda value: type(value).__name__
)
def test_a_value_that_cannot_be_read_is_named(value, kind, instead):
    owners = {("callbacks", "Best"): "mine.Best"}
    for state, place in (({"a": value}, "a"), ({"a": [0, {"b": value}]}, "a.1.b")):
        problems = unreadable({"callbacks": {"Other": {"a": 1}, "Best": state}})
        assert (
            explained(problems, owners)
            == f"mine.Best: its state `{place}` is {kind}; give {instead}"
        )


def test_what_torch_reads_is_no_problem_also_in_a_circle(tmp_path):
    state = {str(number): value for number, value in enumerate(READ)}
    state["circle"] = circle = [1]
    circle.append(circle)
    assert unreadable({"callbacks": {"Best": state}}) == []
    WholeCheckpointIO().save_checkpoint({"callbacks": {"Best": state}}, tmp_path / "a.ckpt")


def test_keys_count_and_of_many_values_three_are_named():
    keys = unreadable({"callbacks": {"Best": {"a": {np.int64(3): 1}}}})
    owners = {("callbacks", "Best"): "mine.Best"}
    assert explained(keys, owners) == "mine.Best: a key of its state `a` is numpy.int64; give int"
    many = explained(unreadable({"callbacks": {"Best": {"a": [np.float64(1)] * 9}}}), owners)
    assert many.count("numpy.float64") == 3
    assert many.endswith("; and 6 more")


# Trainings


class Best(pl.Callback):
    """Keeps a value as people do, with NumPy: from the beginning, or only after some steps."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.best = after, 0.0 if after else np.float64(0)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.after:
            self.best = np.float64(1)

    def state_dict(self):
        return {"best": self.best}


class Began(pl.Callback):
    """Its state is there only when the training starts."""

    began = None

    def on_train_start(self, *_):
        self.began = datetime.datetime.now()

    def state_dict(self):
        return {"began": self.began}


class Hook(pl.Callback):
    """Adds to the checkpoint itself."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["mine"] = {"x": Path("x")}


class Later(pl.Callback):
    """Has nothing to save before its first step."""

    def on_train_batch_end(self, *_):
        self.last = 3

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["last"] = self.last


class Module(LitEDM):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["extra"] = np.int64(3)


class Options(LitEDM):
    def __init__(self, *args, where="x", **kwargs):
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"where": Path(where)})


class Data(Digits):
    def state_dict(self):
        return {"place": np.int64(3)}


def model(kind):
    return kind(edm().denoiser.model, edm().estimator)


@pytest.mark.usefixtures("own_folder")
def test_a_run_is_refused_by_callback_and_key_before_it_starts(capsys):
    line = refusal_of(["fit", "-c", DEMO, *TINY, "--trainer.callbacks+", f"{ME}.Best"], capsys)
    assert line == f"error: {ME}.Best: its state `best` is numpy.float64; give float"
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"callbacks": [Began()]}, r"\.Began: its state `began` is datetime\.datetime"),
        ({"callbacks": [Hook()]}, r"\.Hook: its state `mine\.x` is pathlib\.\w+; give str"),
        ({"model": Module}, r"\.Module: its state `extra` is numpy\.int64; give int"),
        ({"model": Options}, r"\.Options: its state `where` is pathlib\.\w+; give str"),
        ({"data": Data(batch_size=40)}, r"\.Data: its state `place` is numpy\.int64; give int"),
    ],
)
def test_every_part_of_a_run_is_checked_at_the_start(options, words, tmp_path):
    options = dict(options)
    trained = model(options.pop("model", LitEDM))
    with pytest.raises(InputError, match=f"^{ME}{words}"):
        fit(tmp_path, trained, 2, **options)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_hook_that_needs_a_step_first_may_have_one(tmp_path):
    line = r"no checkpoint can be made before the first step: Later\.on_save_checkpoint: AttributeError: .*"
    with pytest.warns(UserWarning, match=f"{line}the first save ends the run if this is still so"):
        _, path = fit(tmp_path, edm(), 2, callbacks=[Later()])
    assert load(path)["last"] == 3


@pytest.mark.filterwarnings("error:.*Best")
def test_a_state_that_is_spoilt_later_costs_no_work(tmp_path):
    with pytest.raises(
        InputError, match=r"Best: its state `best` .*last\.ckpt is saved without this"
    ):
        fit(tmp_path / "a", edm(), 9, every=2, callbacks=[Best(after=2)], val_check_interval=100)
    path = tmp_path / "a" / "run" / "checkpoints" / "last.ckpt"
    saved = read_training(path, to_resume=True)
    assert saved["global_step"] == 2
    assert "Best" not in saved["callbacks"]
    assert "averaging_state" in saved
    # The training goes on from there.
    _, resumed = fit(tmp_path / "b", edm(), 4, path)
    assert load(resumed)["global_step"] == 4


def test_checkpoint_that_lacks_what_it_needs_is_not_written(tmp_path):
    path = tmp_path / "a.ckpt"
    content = {"optimizer_states": [{"param_groups": [{"lr": np.float64(1)}]}], "state_dict": {}}
    with pytest.raises(
        InputError, match=r"`optimizer_states\.0\.param_groups\.0\.lr` .*a\.ckpt is not written"
    ):
        WholeCheckpointIO().save_checkpoint(content, path)
    assert not path.exists()


def test_an_outermost_key_that_cannot_be_read_is_left_out(tmp_path):
    path = tmp_path / "a.ckpt"
    content = {"state_dict": {}, np.float64(1): 2}
    with pytest.raises(InputError, match=r"a key of its state is numpy\.float64.*without this"):
        WholeCheckpointIO().save_checkpoint(content, path)
    assert load(path) == {"state_dict": {}}
