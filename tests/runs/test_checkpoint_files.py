"""Checkpoint files: damaged and hostile ones are refused, good ones are replaced only by whole ones."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_knn.common.checkpoint_file import read_checkpoint_file
from lit_knn.common.errors import InputError
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from tests.interrupted_runs import file_size_limit, fit, ict


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("good"), ict(), 2)[1].read_bytes()


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def without(good, *names):
    content = torch.load(io.BytesIO(good), weights_only=True)
    return saved({name: value for name, value in content.items() if name not in names})


def replaced(good, **values):
    return saved({**torch.load(io.BytesIO(good), weights_only=True), **values})


def zipped(method=zipfile.ZIP_STORED, **parts):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name}.pkl", content)
    return file.getvalue()


def script():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    return file.getvalue()


def array():
    file = io.BytesIO()
    np.savez(file, images=np.zeros(3))
    return file.getvalue()


def legacy(good):
    file = io.BytesIO()
    torch.save(torch.load(io.BytesIO(good), weights_only=True), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def not_finite(good):
    content = torch.load(io.BytesIO(good), weights_only=True)
    next(iter(content["state_dict"].values())).flatten()[0] = float("nan")
    return saved(content)


BAD = {
    "empty": (lambda good: b"", "is damaged, or not a checkpoint"),
    "text": (lambda good: b"PK is not all", "is damaged, or not a checkpoint"),
    "cut": (lambda good: good[:-100], "is damaged"),
    "cut at the front": (lambda good: good[64:], "is damaged, or not a checkpoint"),
    "a pickle before the zip": (lambda good: pickle.dumps({"a": 1}) + good, "is damaged, or not a checkpoint"),
    "legacy": (legacy, "is damaged, or not a checkpoint"),
    "hostile global": (
        lambda good: saved({"state_dict": Command("ran")}),
        "names the global .*mkdir, which",
    ),
    "hostile pickle": (lambda good: zipped(data=pickle.dumps(Command("ran"))), "is damaged, or no checkpoint|refused"),
    "TorchScript": (lambda good: script(), "is a TorchScript program"),
    "another zip": (lambda good: array(), "is a zip file, but not a checkpoint"),
    "compressed": (lambda good: zipped(zipfile.ZIP_DEFLATED, data=b"0" * 10**6), "it is compressed"),
    "list": (lambda good: saved([1, 2]), "holds list, not a dict"),
    "bare state dict": (lambda good: saved({"weight": torch.ones(2)}), "no state_dict and no global_step"),
    "no version": (lambda good: without(good, "pytorch-lightning_version"), "has no pytorch-lightning_version"),
    "no optimiser": (lambda good: without(good, "optimizer_states"), "cannot be resumed from: .* no optimizer_states"),
    "no loops": (lambda good: without(good, "loops"), "cannot be resumed from: the checkpoint has no loops"),
    "state dict of text": (lambda good: replaced(good, state_dict={"a": "b"}), "state_dict is not one of tensors"),
    "NaN": (not_finite, "has weights that are not finite"),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_that_are_no_checkpoints_are_refused_in_one_line(kind, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, words = BAD[kind]
    path = Path("a.ckpt")
    path.write_bytes(make(good))
    with pytest.raises(InputError, match=words) as caught:
        read_training(path, to_resume=True)
    assert str(caught.value).startswith("a.ckpt ")
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert os.listdir() == ["a.ckpt"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "last.ckpt"
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"last\.ckpt is no file, but a folder, a pipe"):
        read_training(path)


def test_what_only_a_fit_needs_is_not_asked_of_others(good, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(without(good, "optimizer_states", "loops", "lr_schedulers"))
    assert read_training(path)["global_step"] == 2


def test_a_flipped_bit_is_found_or_harmless(good, tmp_path):
    path, rng = tmp_path / "a.ckpt", np.random.default_rng(0)
    expected = torch.load(io.BytesIO(good), weights_only=True)["current_model_state"]
    refused = 0
    for place in rng.integers(len(good) * 8, size=100):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << int(place % 8)
        path.write_bytes(flipped)
        try:
            weights = read_checkpoint_file(path)["current_model_state"]
        except InputError:
            refused += 1
        else:  # The bit is in the padding between two parts.
            assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert refused > 40


def test_a_full_disk_keeps_the_old_checkpoint(good, tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(good)
    content = {"weights": torch.zeros(100_000)}
    with file_size_limit(100_000), pytest.raises(InputError, match=r"last\.ckpt cannot be written: .*is kept"):
        WholeCheckpointIO().save_checkpoint(content, path)
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["last.ckpt"]
    # There is room again.
    WholeCheckpointIO().save_checkpoint(content, path)
    assert torch.equal(read_checkpoint_file(path)["weights"], content["weights"])


def test_a_training_on_a_full_disk_ends_with_the_checkpoint_before(tmp_path):
    from tests.interrupted_runs import At

    class Filling(At):
        """The disk is full from a step on; nothing frees it."""

        def __init__(self):
            super().__init__(4, "on_train_batch_end", self.fill)

        def fill(self):
            self.limit = file_size_limit(1000)
            self.limit.__enter__()

    full = Filling()
    try:
        with pytest.raises(InputError, match="cannot be written"):
            fit(tmp_path, ict(), 9, at=full, every=2, logger=False, limit_val_batches=0)
    finally:
        full.limit.__exit__(None, None, None)
    (path,) = tmp_path.rglob("last.ckpt")
    assert read_training(path, to_resume=True)["global_step"] == 2


def test_a_killed_runs_partial_file_is_cleared_away(tmp_path):
    (tmp_path / ".last.12345.partial.ckpt").write_bytes(b"half")
    WholeCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]
