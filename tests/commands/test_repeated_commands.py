"""Commands that were interrupted go on when they are repeated, and commands say early what they cannot write."""

import errno
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import lit_knn
from main import main
from tests.command_lines import refusal_of
from tests.trained_runs import change_checkpoint, last


@pytest.fixture
def run(trained_run, tmp_path, monkeypatch):
    """Return a copy of a trained run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained_run("edm")[0], tmp_path / "runs" / "knn_0")


def test_an_interrupted_export_goes_on_and_replaces_nothing(run, capsys):
    main(["export", str(run), "out"])
    whole = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    for name in ("README.md", "config.json"):
        Path("out", name).unlink()
        main(["export", str(run), "out"])
        assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == whole
    for name in whole:
        with Path("out", name).open("ab") as file:
            file.write(b" ")
        assert f"out/{name} is there already; nothing is overwritten" in refusal_of(["export", str(run), "out"], capsys)
        Path("out", name).write_bytes(whole[name])


def test_a_run_that_was_exported_into_its_own_folder_still_gives_its_last_weights(run):
    main(["export", str(run), str(run)])
    change_checkpoint(run, lambda checkpoint: [weights.neg_() for weights in checkpoint["state_dict"].values()])
    last_weights = lit_knn.load(last(run)).state_dict()
    assert all(torch.equal(value, last_weights[name]) for name, value in lit_knn.load(run).state_dict().items())


def test_a_report_is_printed_again_and_goes_on(run, capsys):
    main(["report", str(run)])
    first = capsys.readouterr().out
    Path("report.pdf").unlink()
    main(["report", str(run)])
    assert capsys.readouterr().out == first
    assert Path("report.pdf").exists()


def test_a_terminal_without_accents_gets_its_table(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["report", str(run)])
    sys.stdout.flush()
    assert rb"| Fr\xe9chet distance on pixels |" in sys.stdout.buffer.getvalue()


def test_best_finds_that_it_cannot_write_before_it_draws_samples(run, capsys, monkeypatch):
    last(run).rename(last(run).with_name("images_seen=128.ckpt"))
    # The superuser may write everywhere, so the right is taken away here.
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run and may(path, mode))
    monkeypatch.setattr("callbacks.Fidelity.samples", lambda *_: pytest.fail("samples were drawn"))
    assert f"nothing can be written into the folder {run}" in refusal_of(["best", "--run", str(run)], capsys)


def test_a_full_disk_names_the_folder_of_the_run(trained_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = trained_run("edm")[1]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lit_knn.commands.cli.save_config.SaveConfigCallback.setup", full)
    line = refusal_of(["fit", *options, "--trainer.logger.save_dir", str(tmp_path / "full")], capsys)
    assert line == f"error: {tmp_path}/full/table2_digits/knn_0: No space left on device"


def test_predictions_of_a_run_lie_in_its_folder(run, trained_run):
    options = [*trained_run("edm")[1], "--trainer.logger.save_dir", ".", "--trainer.logger.name", "runs"]
    for number in range(2):
        main(["predict", *options, "--ckpt_path", str(last(run)), "--data.predict_samples", "1"])
        assert (run / f"predict_{number}" / "predictions" / "000000.png").is_file()
    assert [path.name for path in Path("runs").iterdir()] == ["knn_0"]


def test_a_run_shorter_than_its_validation_interval_is_validated_at_its_end(trained_run, tmp_path):
    place = ["--trainer.logger.save_dir", str(tmp_path), "--trainer.logger.name", "short"]
    main(["fit", *trained_run("edm")[1], *place, "--trainer.max_steps", "3", "--trainer.val_check_interval", "1000"])
    assert list((tmp_path / "short" / "knn_0" / "samples").glob("step_0000003*"))
