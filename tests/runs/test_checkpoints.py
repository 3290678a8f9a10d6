"""Which checkpoints a run leaves, at which steps and with which weights; and files that are damaged or hostile."""

import io
import math
import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import lit_knn
from lit_knn.callbacks import CheckpointByImages, LastCheckpoint, PowerAverages, StepProgressBar
from lit_knn.common.errors import InputError
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.kept_files import kept_checkpoints
from lit_knn.runs.record import Record
from tests import interrupted_runs
from tests.interrupted_runs import file_size_limit, ict, load
from tests.short_training import TRAINER
from tests.watched import Images, OneOfSeveral, WatchedNet


class Saved(pl.Callback):
    """Records the steps of the checkpoints."""

    def __init__(self):
        self.steps = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.steps.append(trainer.global_step)


def fit(*callbacks, net=None, ckpt_path=None, **options):
    """Train with 30 images a batch and two batches an epoch."""
    trainer = pl.Trainer(**{**TRAINER, "callbacks": list(callbacks), **options})
    trainer.fit(
        LitEDM(net or WatchedNet(), OneSample(), lr=0.1, lr_ramp_up_images=0),
        Images(),
        ckpt_path=ckpt_path,
    )


@pytest.mark.parametrize(
    ("every", "options", "steps"),
    [
        (3, {"max_steps": 7}, [3, 6, 7]),
        (4, {"max_steps": 4}, [4]),
        (3, {"max_steps": -1, "max_epochs": 2}, [3, 4]),
        (3, {"max_steps": 7, "max_time": {"seconds": 0}, "min_steps": 2}, [1, 2]),
        (1, {"max_steps": 3, "accumulate_grad_batches": 2}, [1, 2, 3]),
    ],
)
def test_last_checkpoint_is_saved_every_n_steps_and_at_the_end(every, options, steps, tmp_path):
    saved = Saved()
    fit(saved, LastCheckpoint(every, str(tmp_path)), **options)
    assert saved.steps == steps
    checkpoint = load(tmp_path / "last.ckpt")
    assert checkpoint["global_step"] == steps[-1]
    assert checkpoint["images_seen"] == steps[-1] * 30 * options.get("accumulate_grad_batches", 1)


def test_a_run_that_ends_after_an_epoch_keeps_its_last_step(tmp_path):
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    fit(LastCheckpoint(100, str(tmp_path)), Stop(), max_steps=9)
    assert load(tmp_path / "last.ckpt")["global_step"] == 2


def test_checkpoints_by_images_pass_multiples_after_a_resume_too(tmp_path):
    def kept(folder, steps, **options):
        """Train, and return the images seen of the kept checkpoints by the step."""
        fit(
            CheckpointByImages(90, str(folder / "kept")),
            LastCheckpoint(1, str(folder)),
            max_steps=steps,
            **options,
        )
        files = [load(path) for path in (folder / "kept").glob("*.ckpt")]
        return {file["global_step"]: file["images_seen"] for file in files}

    assert kept(tmp_path / "first", 4) == {3: 90}
    assert kept(tmp_path / "second", 7, ckpt_path=tmp_path / "first" / "last.ckpt") == {6: 180}
    # Checkpoints are of whole steps: 90 images are passed within the second step of two batches.
    assert kept(tmp_path / "third", 3, accumulate_grad_batches=2) == {2: 120, 3: 180}
    # A resumed run saves no batch that only adds gradients, which the checkpoint would not hold.
    saved, path = Saved(), tmp_path / "third" / "last.ckpt"
    options = {"accumulate_grad_batches": 2, "max_epochs": -1}
    fit(saved, LastCheckpoint(1, str(tmp_path)), max_steps=5, ckpt_path=path, **options)
    assert saved.steps == [4, 5]
    # float32 would round this number.
    seen = SimpleNamespace(images_seen=2**24 + 1, images_of_step=1)
    assert CheckpointByImages(1).name_of_file(None, seen) == "images_seen=16777217.ckpt"


class TwoWeights(WatchedNet):
    """Has one more weight of three numbers, which its output does not depend on."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.ones(3))

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) + 0 * self.other.detach().nan_to_num().sum()


class Breaks(pl.Callback):
    """Puts one NaN into one of the weights after the third step."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 3:
            pl_module.denoiser.model.other.data[1] = math.nan


@pytest.mark.filterwarnings("ignore:the weights are not finite")
def test_a_nonfinite_number_keeps_the_checkpoint_before_it(tmp_path):
    fit(Breaks(), LastCheckpoint(1, str(tmp_path)), net=TwoWeights(), max_steps=5, strategy="auto")
    checkpoint = load(tmp_path / "last.ckpt")
    assert checkpoint["global_step"] == 2
    assert checkpoint["state_dict"]["denoiser.model.other"].isfinite().all()


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 2:
            raise RuntimeError("one rank fails")


@pytest.mark.parametrize(("size", "left"), [(1, True), (2, False)])
def test_an_error_is_saved_by_a_single_process_alone(size, left, tmp_path):
    # Saving needs all ranks, and the others may not know of the error.
    with pytest.raises(RuntimeError, match="one rank fails"):
        fit(Fails(), LastCheckpoint(9, str(tmp_path)), max_steps=5, strategy=OneOfSeveral(0, size))
    assert (tmp_path / "last.ckpt").exists() is left


def test_a_run_that_ends_after_a_validation_knows_its_best_value(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val/loss")
    options = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    with pytest.raises(RuntimeError, match="one rank fails"):
        fit(Fails(), best, LastCheckpoint(9, str(tmp_path)), max_steps=5, **options)
    states = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    (state,) = (state for name, state in states.items() if name.startswith("ModelCheckpoint"))
    assert state["best_model_score"] == best.best_model_score > 0


class Places(StepProgressBar):
    """Records the place and the end of the bar at the start and after each batch."""

    def on_train_start(self, *args):
        super().on_train_start(*args)
        self.seen = [(self.train_progress_bar.n, self.train_progress_bar.total)]

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.seen.append((self.train_progress_bar.n, self.train_progress_bar.total))


def test_progress_bar_counts_optimiser_steps_after_a_resume(tmp_path):
    bar, shown = Places(), {"enable_progress_bar": True, "accumulate_grad_batches": 2}
    fit(bar, LastCheckpoint(dirpath=str(tmp_path)), max_steps=2, **shown)
    assert bar.seen == [(0, 2), (0, 2), (1, 2), (1, 2), (2, 2)]
    fit(bar, max_steps=4, ckpt_path=tmp_path / "last.ckpt", enable_checkpointing=False, **shown)
    assert (bar.seen[0], bar.seen[-1]) == ((2, 4), (4, 4))


def write_run(folder, kept, last, resumed_from=None):
    """Write the folder of a run: its kept checkpoints, the last one as (images seen, step), its config and record."""
    (folder / "checkpoints").mkdir(parents=True)
    files = {f"images_seen={seen}.ckpt": (seen, seen // 10) for seen in kept} | {"last.ckpt": last}
    for name, (seen, step) in files.items():
        content = {
            "state_dict": {},
            "images_seen": seen,
            "global_step": step,
            "pytorch-lightning_version": "2",
        }
        torch.save(content, folder / "checkpoints" / name)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {}, "data": {}, "trainer": {}}))
    Record(resumed_from=resumed_from).write(folder)


def test_kept_checkpoints_of_resumed_run_are_pruned_after_it(
    tmp_path,
):
    write_run(tmp_path / "a", [100, 200, 300], (200, 20))
    write_run(
        tmp_path / "b", [250, 350], (370, 37), str(tmp_path / "a" / "checkpoints" / "last.ckpt")
    )
    for max_steps, end in ((-1, []), (38, []), (37, [370])):
        found = kept_checkpoints(RunFolder(tmp_path / "b"), max_steps=max_steps)
        assert list(found) == [100, 200, 250, 350, *end]
        assert [path.parent.parent.name for path in found.values()] == [
            "a",
            "a",
            "b",
            "b",
            *["b"] * len(end),
        ]
    # The first run goes on beyond the other's end.
    write_run(tmp_path / "d", [100, 200, 300, 400], (400, 40))
    write_run(
        tmp_path / "e", [250, 350], (350, 35), str(tmp_path / "d" / "checkpoints" / "last.ckpt")
    )
    assert list(kept_checkpoints(RunFolder(tmp_path / "e"))) == [100, 200, 250, 350]
    write_run(tmp_path / "c", [100, 200], (200, 20))
    found = kept_checkpoints(RunFolder(tmp_path / "c"), max_steps=20)
    assert [path.name for path in found.values()] == [
        "images_seen=100.ckpt",
        "images_seen=200.ckpt",
    ]


def test_a_branch_keeps_its_own_checkpoint_of_as_many_images(tmp_path):
    trunk = tmp_path / "trunk"
    write_run(trunk, [100, 200, 300], (300, 30))  # It went on after the branch had begun.
    write_run(tmp_path / "branch", [200], (250, 25), str(trunk / "checkpoints" / "last.ckpt"))
    checkpoints = kept_checkpoints(RunFolder(tmp_path / "branch"))
    assert [path.parent.parent.name for path in checkpoints.values()] == ["trunk", "branch"]


class Noted(nn.Module):
    """A network with an extra state that is no tensor, as those of other programs may have."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, z, noise_label, class_label=None):
        return self.weight * z

    def get_extra_state(self):
        return {"scale": 1.5, "n": 3}

    def set_extra_state(self, state):
        self.noted = state


def test_a_checkpoint_with_an_extra_state_is_read_resumed_and_loaded(tmp_path):
    averages = PowerAverages((0.1,), every_n_images=16)
    model = LitEDM(Noted(), OneSample())
    path = interrupted_runs.fit(tmp_path / "a", model, 2, callbacks=[averages])[1]
    assert read_training(path, to_resume=True)["global_step"] == 2
    resumed = LitEDM(Noted(), OneSample())
    interrupted_runs.fit(tmp_path / "b", resumed, 3, path)
    assert resumed.network.noted == {"scale": 1.5, "n": 3}
    net = Noted()
    assert lit_knn.load(path, net=net).sample([0]).isfinite().all()
    assert net.noted == {"scale": 1.5, "n": 3}


# Files


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return interrupted_runs.fit(tmp_path_factory.mktemp("good"), ict(), 2)[1].read_bytes()


class Command:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def written(write, *args, **options):
    """Return the bytes that `write` writes into a file."""
    file = io.BytesIO()
    write(*args, file, **options)
    return file.getvalue()


def changed(good, *without, **values):
    """The checkpoint with other values, and without some."""
    content = {**load(io.BytesIO(good)), **values}
    return written(
        torch.save, {name: value for name, value in content.items() if name not in without}
    )


def not_finite(good):
    content = load(io.BytesIO(good))
    next(iter(content["state_dict"].values())).flatten()[0] = float("nan")
    return written(torch.save, content)


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return file.getvalue()


BAD = {
    "cut": (lambda good: good[:-100], "is damaged"),
    "hostile global": (
        lambda good: written(torch.save, {"state_dict": Command()}),
        "names the global .*mkdir, which",
    ),
    "hostile pickle": (
        lambda good: zipped(pickle.dumps(Command())),
        "is damaged, or no checkpoint|refused",
    ),
    "bare state dict": (
        lambda good: written(torch.save, {"a": torch.ones(2)}),
        "no state_dict and no global_step",
    ),
    "no loops": (
        lambda good: changed(good, "loops"),
        "cannot be resumed from: the checkpoint has no loops",
    ),
    "NaN": (not_finite, "has weights that are not finite"),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_that_are_no_checkpoints_are_refused_in_one_line(kind, good, own_folder):
    make, words = BAD[kind]
    path = Path("a.ckpt")
    path.write_bytes(make(good))
    with pytest.raises(InputError, match=words) as caught:
        read_training(path, to_resume=True)
    assert str(caught.value).startswith("a.ckpt ")
    assert "\n" not in str(caught.value)
    assert os.listdir() == ["a.ckpt"]


def test_what_only_a_fit_needs_is_not_asked_of_others(good, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(changed(good, "optimizer_states", "loops", "lr_schedulers"))
    assert read_training(tmp_path / "a.ckpt")["global_step"] == 2


def test_a_full_disk_keeps_the_old_checkpoint(good, tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(good)
    # A run that was killed has left this file.
    (tmp_path / ".last.12345.partial.ckpt").write_bytes(b"half")
    content = {"weights": torch.zeros(100_000)}
    with (
        file_size_limit(100_000),
        pytest.raises(InputError, match=r"last\.ckpt cannot be written: .*is kept"),
    ):
        WholeCheckpointIO().save_checkpoint(content, path)
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["last.ckpt"]
    # There is room again. A checkpoint that was read before is another one.
    io = WholeCheckpointIO()
    io.save_checkpoint(content, path)
    io.keep("another.ckpt", {"weights": torch.ones(1)})
    assert torch.equal(io.load_checkpoint(path)["weights"], content["weights"])


def test_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch):
    # The superuser may write everywhere, so the right is taken away here.
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode == os.W_OK and path == tmp_path))
    with pytest.raises(InputError, match="nothing can be written into"):
        fit(LastCheckpoint(1, str(tmp_path)), max_steps=1)
