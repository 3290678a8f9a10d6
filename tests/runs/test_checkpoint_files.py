"""Checkpoint files: damaged and hostile ones are refused, good ones are replaced only by whole ones."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_knn.common.checkpoint_file import last_checkpoint, read_checkpoint_file
from lit_knn.common.errors import InputError
from lit_knn.runs.checkpoints import WholeCheckpointIO, read_training
from tests.interrupted_runs import At, file_size_limit, fit, ict


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("good"), ict(), 2)[1].read_bytes()


class Command:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def written(write, *args, **options):
    """Return the bytes that `write` writes into a file."""
    file = io.BytesIO()
    write(*args, file, **options)
    return file.getvalue()


def contents(good):
    return torch.load(io.BytesIO(good), weights_only=True)


def changed(good, *without, **values):
    """The checkpoint with other values, and without some."""
    content = {**contents(good), **values}
    return written(torch.save, {name: value for name, value in content.items() if name not in without})


def not_finite(good):
    content = contents(good)
    next(iter(content["state_dict"].values())).flatten()[0] = float("nan")
    return written(torch.save, content)


def zipped(data, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/data.pkl", data)
    return file.getvalue()


def array():
    file = io.BytesIO()
    np.savez(file, images=np.zeros(3))
    return file.getvalue()


BAD = {
    "empty": (lambda good: b"", "is damaged, or not a checkpoint"),
    "cut": (lambda good: good[:-100], "is damaged"),
    "a pickle before the zip": (lambda good: pickle.dumps({"a": 1}) + good, "is damaged, or not a checkpoint"),
    "legacy": (
        lambda good: written(torch.save, contents(good), _use_new_zipfile_serialization=False),
        "is damaged, or not a checkpoint",
    ),
    "hostile global": (lambda good: written(torch.save, {"state_dict": Command()}), "names the global .*mkdir, which"),
    "hostile pickle": (lambda good: zipped(pickle.dumps(Command())), "is damaged, or no checkpoint|refused"),
    "TorchScript": (
        lambda good: written(torch.jit.save, torch.jit.script(torch.nn.Linear(2, 2))),
        "is a TorchScript program",
    ),
    "another zip": (lambda good: array(), "is a zip file, but not a checkpoint"),
    "compressed": (lambda good: zipped(b"0" * 10**6, zipfile.ZIP_DEFLATED), "it is compressed"),
    "list": (lambda good: written(torch.save, [1, 2]), "holds list, not a dict"),
    "bare state dict": (lambda good: written(torch.save, {"a": torch.ones(2)}), "no state_dict and no global_step"),
    "no version": (lambda good: changed(good, "pytorch-lightning_version"), "has no pytorch-lightning_version"),
    "no optimiser": (lambda good: changed(good, "optimizer_states"), "cannot be resumed from: .* no optimizer_states"),
    "no loops": (lambda good: changed(good, "loops"), "cannot be resumed from: the checkpoint has no loops"),
    "state dict of text": (lambda good: changed(good, state_dict={"a": "b"}), "state_dict is not one of tensors"),
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
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(InputError, match=r"last\.ckpt is no file, but a folder, a pipe"):
        read_training(tmp_path / "last.ckpt")


def test_what_only_a_fit_needs_is_not_asked_of_others(good, tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(changed(good, "optimizer_states", "loops", "lr_schedulers"))
    assert read_training(path)["global_step"] == 2


def test_a_flipped_bit_is_found_or_harmless(good, tmp_path):
    path, rng = tmp_path / "a.ckpt", np.random.default_rng(0)
    expected = contents(good)["current_model_state"]
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
    # A run that was killed has left this file.
    (tmp_path / ".last.12345.partial.ckpt").write_bytes(b"half")
    content = {"weights": torch.zeros(100_000)}
    with file_size_limit(100_000), pytest.raises(InputError, match=r"last\.ckpt cannot be written: .*is kept"):
        WholeCheckpointIO().save_checkpoint(content, path)
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["last.ckpt"]
    # There is room again.
    WholeCheckpointIO().save_checkpoint(content, path)
    assert torch.equal(read_checkpoint_file(path)["weights"], content["weights"])


def test_a_training_on_a_full_disk_ends_with_the_checkpoint_before(tmp_path):
    limit = file_size_limit(1000)
    full = At(4, "on_train_batch_end", limit.__enter__)
    try:
        with pytest.raises(InputError, match="cannot be written"):
            fit(tmp_path, ict(), 9, at=full, every=2, logger=False, limit_val_batches=0)
    finally:
        limit.__exit__(None, None, None)
    (path,) = tmp_path.rglob("last.ckpt")
    assert read_training(path, to_resume=True)["global_step"] == 2


def test_a_run_without_its_last_checkpoint_is_its_kept_one_with_the_most_images(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for images in (90, 1000, 128):  # By name, 90 would come last.
        (folder / f"images_seen={images}.ckpt").touch()
    assert last_checkpoint(tmp_path) == folder / "images_seen=1000.ckpt"
    (folder / "last.ckpt").touch()
    assert last_checkpoint(tmp_path) == folder / "last.ckpt"
