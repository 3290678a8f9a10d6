"""Schedules step once an optimiser step, and no option of the learning rate silently replaces another."""

import pytest
import torch

from main import main
from tests.command_lines import ROOT, TINY

DEMO = str(ROOT / "configs" / "demo.yaml")
EDM = str(ROOT / "configs" / "table2" / "digits.yaml")
SCHEDULE = str(ROOT / "configs" / "schedules" / "warmup_cosine.yaml")


def fit(folder, config, *args):
    logger = ["--trainer.logger.save_dir", str(folder), "--trainer.logger.name", "run"]
    main(["fit", "-c", config, *TINY, *logger, *args])
    checkpoint = torch.load(folder / "run" / "knn_0" / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["optimizer_states"][0]["param_groups"][0]["lr"], checkpoint


@pytest.mark.parametrize(
    ("config", "more"), [(DEMO, []), (EDM, ["--model.lr_ramp_up_images", "0"])], ids=["iCT", "EDM"]
)
def test_a_cosine_over_the_steps_ends_at_0(config, more, tmp_path):
    options = ["--optimizer", "Adam", "--optimizer.lr", "0.002", "--model.lr", "0.002", "--trainer.max_steps", "4"]
    cosine = ["--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "4"]
    rate, checkpoint = fit(tmp_path, config, *more, *options, *cosine)
    assert checkpoint["global_step"] == 4
    assert rate == pytest.approx(0, abs=1e-9)


def test_the_config_of_warm_up_and_cosine_ends_near_0(tmp_path):
    rates = ["--model.lr", "1e-4", "--optimizer.lr", "1e-4", "--lr_scheduler.max_lr", "1e-4"]
    rate, _ = fit(tmp_path, DEMO, "-c", SCHEDULE, *rates, "--lr_scheduler.total_steps", "5", "--trainer.max_steps", "4")
    assert rate < 1e-6


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("--optimizer Adam --optimizer.lr 0.1", "--optimizer.lr=0.1 and --model.lr=0.002 are two learning rates"),
        ("--optimizer Adam", "--optimizer.lr=0.001 and --model.lr=0.002 are two learning rates"),
        (
            "--optimizer Adam --optimizer.lr 0.002 --lr_scheduler CosineAnnealingLR --lr_scheduler.T_max 9",
            "--model.lr_ramp_up_images=10000 sets the learning rate at every step",
        ),
    ],
)
def test_contradictions_are_refused(args, told, tmp_path, capsys):
    with pytest.raises(SystemExit):
        fit(tmp_path, EDM, *args.split())
    assert told in capsys.readouterr().err
