"""Whole command lines that signals kill, also one rank of two; resumed until they are done, they lose nothing."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.interrupted_runs import assert_same, killed
from tests.ranks import ROOT, run_main

NET = ["--model.net.channels", "8", "--data.batch_size", "16", "--data.val_images", "32"]
ICT = ["fit", "-c", str(ROOT / "configs/demo.yaml"), *NET, "--model.estimator.k", "32", "--model.estimator.n", "8"]
EDM = ["fit", "-c", str(ROOT / "configs/table2/digits.yaml"), "--model.augmentation", "null", "--model.net", "UNet"]
EDM += ["--model.net.in_channels", "1", "--model.net.multipliers", "[1]", "--model.net.blocks", "1", *NET]
EDM += ["--model.net.augment_dim", "0"]

pytestmark = pytest.mark.slow


def run(folder, args, steps, ranks, *callbacks):
    """Start or go on with the run in the folder; the callbacks may kill it."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "killed"}}
    options = {"accelerator": "cpu", "max_steps": steps, "val_check_interval": 5, "enable_progress_bar": False}
    config = {**options, "logger": logger, "enable_model_summary": False, "callbacks": list(callbacks)}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": config, "last_checkpoint": {"every_n_steps": 2}}))
    saved = ["--ckpt_path", "last"] if list(Path("runs").rglob("last.ckpt")) else []
    return run_main([*args, "-c", "run.yaml", *saved], ranks, check=False)


def final(folder, steps):
    """The checkpoint of the last step."""
    paths = folder.rglob("last.ckpt")
    return next(path for path in paths if torch.load(path, weights_only=True)["global_step"] == steps)


@pytest.fixture(autouse=True)
def _come_back(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_two_ranks_of_which_one_is_killed_or_stopped(tmp_path):
    kills = [
        ({"step": 4, "hook": "on_before_optimizer_step", "signum": 9, "rank": 1}, [2, -9]),
        ({"step": 5, "hook": "on_after_backward", "signum": 15, "rank": 1}, [143, 0]),
        ({"step": 7, "hook": "on_train_batch_start", "signum": 2, "rank": 0}, [130, 0]),
    ]
    whole = run(tmp_path / "whole", ICT, 10, 2)
    assert whole.codes == [0, 0], whole.stderr[-2000:]
    for options, codes in kills:
        done = run(tmp_path / "killed", ICT, 10, 2, killed("KilledAt", **options))
        assert done.codes == codes, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        if options["signum"] == signal.SIGKILL:
            (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert error.startswith("error: another process ended in training")
        else:
            assert "--ckpt_path runs/killed/knn_0/checkpoints/last.ckpt" in done.stderr
    assert run(tmp_path / "killed", ICT, 10, 2).codes == [0, 0]
    # Both ranks of each part went on in the folder of the first part.
    assert [path.name for path in Path("runs/killed").iterdir()] == ["knn_0"]
    assert_same(final(tmp_path / "killed", 10), final(tmp_path / "whole", 10))
    # One rank alone would draw other noise.
    alone = run(tmp_path / "killed", ICT, 12, 1)
    assert alone.codes == [2]
    assert "ranks (trainer.devices times trainer.num_nodes) 2, not 1" in alone.stderr


@pytest.mark.parametrize(("args", "ranks", "kills"), [(ICT, 1, 7), (EDM, 1, 7), (ICT, 2, 6)], ids=["ict", "edm", "two"])
def test_random_kills_lose_nothing(args, ranks, kills, tmp_path):
    steps, rng = 120, np.random.default_rng(len(args) + ranks)
    whole = run(tmp_path / "whole", args, steps, ranks)
    assert not any(whole.codes), whole.stderr[-2000:]
    for number in range(kills):
        signum = int(rng.permutation([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])[0])
        options = {"seconds": float(rng.uniform(0, 1.5)), "signum": signum, "rank": int(rng.integers(ranks))}
        done = run(tmp_path / "killed", args, steps, ranks, killed("KilledAfter", **options))
        print(number, options, done.codes)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        assert any(done.codes) or list((tmp_path / "killed").rglob("last.ckpt"))
    done = run(tmp_path / "killed", args, steps, ranks)
    assert not any(done.codes), done.stderr[-2000:]
    assert_same(final(tmp_path / "killed", steps), final(tmp_path / "whole", steps))
