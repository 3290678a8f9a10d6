"""`fit` tells the time of a step before training, and the run stays the same, bit for bit; `plan` tells it, too."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.callbacks import StepCost, step_cost
from lit_knn.commands.cli.memory_check import warn_of_large_images
from lit_knn.data import Arrays
from lit_knn.estimators import KNN
from lit_knn.modules import LitEDM, first_try
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.first_try import StepTime
from lit_knn.runs.times import duration
from main import main
from tests.interrupted_runs import assert_same, edm, fit, ict

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def any_run(monkeypatch):
    """Runs of few steps are tried, too."""
    monkeypatch.setattr(step_cost, "FEWEST_STEPS", 0)


class Normalised(nn.Module):
    """Has what a try could change: running means, random numbers of PyTorch and Python, dropout."""

    augment_dim = 9

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3, padding=1))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        shift = torch.rand(()) + random.random()
        return self.net(nn.functional.dropout(z)) + shift


def augmented():
    return LitEDM(Normalised(), KNN(k=16, n=4), lr=1e-2, augmentation=GeometricAugmentation(0.5))


@pytest.mark.usefixtures("any_run")
@pytest.mark.parametrize("make", [ict, augmented])
def test_a_run_with_a_try_is_the_run_without_one(make, tmp_path, capsys):
    paths = []
    for name, callbacks in (("without", []), ("with", [StepCost()])):
        random.seed(0)
        model = make()
        torch.manual_seed(1)
        paths.append(fit(tmp_path / name, model, 3, accumulate_grad_batches=2, callbacks=callbacks)[1])
        assert ("3 steps about" in capsys.readouterr().out) == (name == "with")
    assert_same(*paths)
    columns = [(path.parents[1] / "metrics.csv").read_text().splitlines()[0] for path in paths]
    assert columns[0] == columns[1]


def told_by(folder, capsys, model, times, **options):
    """Run two steps whose tries take these (seconds, seconds of the estimator); return the lines about steps."""
    tries = iter(times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_cost, "try_step", lambda *_: StepTime(*next(tries)))
        fit(folder, model, 2, callbacks=[StepCost()], **options)
    assert not list(tries)
    return [line for line in capsys.readouterr().out.splitlines() if "step" in line]


@pytest.mark.usefixtures("any_run")
def test_the_second_try_counts_and_a_long_one_is_not_repeated(tmp_path, capsys):
    # A step has two batches of 40 images.
    (line,) = told_by(tmp_path / "a", capsys, edm(), [(9.0, 5.0), (2.0, 0.5)], accumulate_grad_batches=2)
    assert line == "A step of 80 images takes about 4 s (estimator 1 s): 2 steps about 8 s"
    (line,) = told_by(tmp_path / "b", capsys, edm(), [(45.0, 30.0)])
    assert line == "A step of 40 images takes about 45 s (estimator 30 s): 2 steps about 1 min 30 s, by a single try"


@pytest.mark.usefixtures("any_run")
def test_a_compiled_network_is_not_tried(tmp_path, capsys):
    model = edm()
    model.network.compile()
    with torch.compiler.set_stance("force_eager"):
        (line,) = told_by(tmp_path, capsys, model, [])
    assert "compiled" in line


def test_nothing_is_tried_before_a_short_run(tmp_path, capsys):
    assert told_by(tmp_path, capsys, edm(), []) == []


TIMES = {0.0344: "0.034 s", 59.4: "59 s", 59.7: "1 min 0 s", 170.2: "2 min 50 s", 3600: "1 h 0 min"}
TIMES |= {86399.9: "24 h 0 min", 2 * 86400: "2 days"}


@pytest.mark.parametrize(("seconds", "told"), TIMES.items())
def test_times_are_told_in_units_of_people(seconds, told):
    assert duration(seconds) == told


def test_plan_tells_the_time_of_a_step_where_it_can(capsys, monkeypatch):
    plan = ["plan", "-c", str(CONFIGS / "table2" / "digits_conditional.yaml"), "--trainer.accelerator", "cpu"]
    plan += ["--model.net.channels", "8", "--trainer.max_steps", "1000", "--data.batch_size", "6"]
    main([*plan, "--gpu_gb", "80"])
    assert "The time of a step is not known" in capsys.readouterr().out.splitlines()[-1]
    sizes, times = [], iter([9.0, 1.0, 9.0, 3.0])

    def tried(model, trainer, batch):
        sizes.append(len(batch[0]))
        first_seconds = first_try.StepTime(next(times), 0.0)
        return real(model, trainer, batch) and first_seconds

    real = first_try.try_step
    monkeypatch.setattr(first_try, "try_step", tried)
    main(plan)
    # The try of 4 images took long enough, 3 s; 6 images take half as long again.
    assert sizes == [1, 1, 4, 4]
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match("A step of 6 images takes about 4.5 s on this cpu, without the estimator", line)
    assert line.endswith("(by a try of 4 images): 1,000 steps about 1 h 15 min")


@pytest.mark.parametrize(("shape", "warns"), [((2, 129, 32, 3), True), ((2, 128, 128, 3), False), ((2, 300), False)])
def test_images_above_128_pixels_are_warned_of(shape, warns, tmp_path, recwarn):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8 if len(shape) > 2 else np.float32))
    warn_of_large_images(Arrays(str(tmp_path / "a.npy")))
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == warns
    assert all("129 x 32 pixels" in line and "lit-knn prepare" in line for line in told)
