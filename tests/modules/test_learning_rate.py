"""Schedules step once an optimiser step, and no option of the learning rate silently replaces another."""

import pytest
import torch

from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM
from main import main
from tests.command_lines import ROOT, TINY, refusal_of
from tests.short_training import train
from tests.watched import Images, WatchedNet

DEMO = str(ROOT / "configs" / "demo.yaml")
EDM = str(ROOT / "configs" / "table2" / "digits.yaml")
WARMUP = ["-c", str(ROOT / "configs" / "schedules" / "warmup_cosine.yaml"), "--lr_scheduler.max_lr", "0.002"]
WARMUP += ["--lr_scheduler.total_steps", "5"]
ADAM = ["--optimizer", "Adam", "--optimizer.lr", "0.002", "--model.lr", "0.002"]
COSINE = ["--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "4"]


@pytest.mark.parametrize(
    ("config", "args"),
    [
        (DEMO, [*ADAM, *COSINE]),
        (EDM, [*ADAM, *COSINE, "--model.lr_ramp_up_images", "0"]),
        (DEMO, [*WARMUP, "--model.lr", "0.002", "--optimizer.lr", "0.002"]),
    ],
    ids=["iCT", "EDM", "iCT with the config of warm-up and cosine"],
)
def test_a_cosine_over_the_steps_ends_at_0(config, args, tmp_path):
    logger = ["--trainer.logger.save_dir", str(tmp_path), "--trainer.logger.name", "run"]
    main(["fit", "-c", config, *TINY, *logger, "--trainer.max_steps", "4", *args])
    checkpoint = torch.load(tmp_path / "run" / "knn_0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 4
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-7)


def test_a_schedule_sets_the_rate_of_every_step_alone():
    seen = []

    class Scheduled(LitEDM):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["lr"]))
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    train(Scheduled(WatchedNet(), OneSample(), lr=0.002, lr_ramp_up_images=1000), Images(), 3)
    assert seen == pytest.approx([0.002, 0.0015, 0.001])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--optimizer.lr", "0.1"], "--optimizer.lr=0.1 and --model.lr=0.002 are two learning rates"),
        ([], "--optimizer.lr=0.001 and --model.lr=0.002 are two learning rates"),
        (["--optimizer.lr", "0.002", *COSINE], "--model.lr_ramp_up_images=10000 sets the learning rate at every step"),
    ],
)
def test_contradictions_are_refused(args, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told in refusal_of(["fit", "-c", EDM, *TINY, "--optimizer", "Adam", *args], capsys)
