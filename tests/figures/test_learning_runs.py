"""The learning curves' grid: every run is trained once, whatever interrupts it, and bad options are refused."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.learning_curves.__main__ import main
from benchmarks.learning_curves.grid import CIFAR, MODULES, VARIANTS, runs_of, targets
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.table import CurveTable
from benchmarks.learning_curves.training import Measure
from lit_knn.common.errors import InputError

TINY = [
    "--steps",
    "2",
    "--consistency-steps",
    "2",
    "--measurements",
    "2",
    "--batch-size",
    "16",
    "--samples",
    "80",
]
TINY += ["--held", "20", "--pairs", "4", "--repeats", "2", "--seeds", "1"]
TINY += ["--modules", "EDM", "ECT lr 1e-4", "--estimators", "OneSample", "KNN"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TIMES = {"cpu_seconds", "seconds", "estimator_seconds"}


def killed_at_step_2(hook):
    """Make a hook of a callback that fails in ECT's last measurement."""

    def killed(self, trainer, module):
        if type(module).__name__ == "LitECT" and trainer.global_step == 2:
            raise RuntimeError("killed")
        hook(self, trainer, module)

    return killed


def test_finished_run_is_kept_and_stopped_one_is_remade_equal(tmp_path, monkeypatch):
    def rows_of(path):
        main(["--output", str(path), "--checkpoints", str(path.with_suffix("")), *TINY])
        rows = csv.DictReader(path.open())
        return {(row["module"], row["estimator"], row["step"]): row for row in rows}

    whole, shorter = tmp_path / "whole.csv", tmp_path / "shorter.csv"
    kept = rows_of(whole)
    # The networks of all measurements are there, for measures of later.
    folders = [path.parent for path in (tmp_path / "whole").rglob("last.ckpt")]
    steps = {int(step) for _, _, step in kept}
    assert folders
    assert all((folder / f"step={step}.ckpt").exists() for folder in folders for step in steps)
    lines = whole.read_text().splitlines(keepends=True)
    # without ECT, OneSample: it starts from EDM, OneSample, again
    shorter.write_text("".join(line for line in lines if "ECT" not in line or ",KNN," in line))
    # It is killed in its last measurement, which must not lose the row.
    with monkeypatch.context() as patch:
        patch.setattr(Measure, "on_validation_end", killed_at_step_2(Measure.on_validation_end))
        with pytest.raises(SystemExit):
            rows_of(shorter)
    again = rows_of(shorter)
    assert again.keys() == kept.keys()
    for key, row in again.items():
        differing = {name for name in row if row[name] != kept[key][name]}
        assert differing <= (TIMES if "ECT" in key[0] and key[1] == "OneSample" else set())
    # Averages of other lengths are measured at the end.
    averages = {key: row["val_error"] for key, row in again.items() if "average" in key[0]}
    assert {step for _, _, step in averages} == {"2"}
    assert len(averages) == 8
    for name in ("OneSample", "KNN"):
        short, long = (f"ECT lr 1e-4, average {length}" for length in (0.02, 0.2))
        assert averages[short, name, "2"] != averages[long, name, "2"]


def test_score_difference_starts_from_ict_and_mean_flow_takes_own_velocity(tmp_path):
    path = tmp_path / "few.csv"
    options = [*TINY[: TINY.index("--modules")], "--consistency-steps", "20"]
    options += ["--modules", "MeanFlow", "score difference"]
    options += ["--estimators", "OneSample, network", "128 images"]
    main(["--output", str(path), "--checkpoints", str(tmp_path / "runs"), *options])
    last = {(row["module"], row["estimator"]): row for row in csv.DictReader(path.open())}
    assert set(last) == {
        ("MeanFlow", "OneSample, network"),
        ("iCT", "OneSample"),
        ("score difference", "128 images"),
    }
    generator = last["score difference", "128 images"]
    # Two steps of four times sixteen samples, after twenty steps of sixteen images.
    assert (generator["images"], generator["images_before"]) == ("128", "320")
    assert math.isnan(float(generator["gradient_variance"]))
    assert math.isfinite(float(generator["fd_pixels"]))
    assert float(last["MeanFlow", "OneSample, network"]["gradient_variance"]) > 0


def test_rows_of_a_file_load_and_other_columns_are_refused(tmp_path):
    source = RESULTS / "learning_curves_cifar16_1000_cpu.csv"
    copy = tmp_path / source.name
    shutil.copy(source, copy)
    rows = CurveTable(copy).load()
    assert len(rows) == len(list(csv.DictReader(source.open())))
    other = copy.read_text().replace("held_out_loss", "loss")
    copy.write_text(other)
    with pytest.raises(InputError, match="other columns"):
        CurveTable(copy).load()


@pytest.mark.parametrize("name", ["digits", *CIFAR])
def test_every_module_of_a_set_has_estimators_that_fit_it(name):
    by_default = {run.module for run in runs_of(name, None, None, 1)}
    by_class = name == "cifar16_classes"
    assert by_default == ({"EDM", "flow"} if by_class else set(MODULES))
    for module in () if by_class else (*MODULES, *VARIANTS):
        for plug_ins in targets(name, module).values():
            repulsion = plug_ins().get("repulsion")
            # The score difference cannot search more neighbours than it keeps samples.
            assert getattr(repulsion, "k", 0) <= KINDS["score difference"].options(1)["bank_size"]


def test_further_seeds_follow_those_that_are_there():
    seeds = {run.seed for run in runs_of("digits", ["EDM"], ["Exact"], 3, 4)}
    assert seeds == {4, 5, 6}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--modules EDN", "--modules EDN: digits has ECT, ECT k 0"),
        ("--modules EDM --estimators Exakt", "--estimators Exakt: EDM has Exact, KNN, OneSample"),
        ("--modules EDM --estimators network", "--estimators network: EDM has"),
        ("--modules EDM iCT --seeds 0", "--seeds must be at least 1"),
        ("--modules EDM --first-seed -1", "--first-seed must be at least 0, got -1"),
        ("--modules EDM MeanFlow --estimators STF", "MeanFlow has none of them"),
        ("--set cifar16", "--kept: name the file of the images of cifar16"),
        ("--set cifar16 --kept none.npz", "--kept none.npz: cifar16 needs the file, or --images"),
        ("--modules iCT --measurements 7", "must divide the steps of iCT, 600"),
    ],
)
def test_bad_options_are_refused_before_the_training(tmp_path, capsys, options, line):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "rows.csv"), *options.split()])
    assert line in capsys.readouterr().err


def test_images_of_another_size_are_refused_and_not_kept(tmp_path, capsys):
    folder, kept = tmp_path / "images" / "a", tmp_path / "kept.npz"
    folder.mkdir(parents=True)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "0.png")
    (folder.parent / "dataset.json").write_text('{"labels": [["a/0.png", 0]]}')
    options = ["--set", "cifar16", "--images", str(folder.parent), "--kept", str(kept)]
    with pytest.raises(SystemExit):
        main([*options, "--output", str(tmp_path / "rows.csv")])
    assert "needs images (3, 32, 32), got (3, 16, 16)" in capsys.readouterr().err
    assert not kept.exists()


def test_ect_is_measured_at_the_levels_of_its_own_mapping():
    for name, k in (("ECT", 8.0), ("ECT k 0", 0.0)):
        t, lower = KINDS[name].levels(50, torch.Generator().manual_seed(0))
        # n(t) = 1 + k·sigmoid(−t) and the last of four stages divides it by 2⁴.
        wanted = t * (1 - (1 + k / (1 + t.exp())) / 16)
        torch.testing.assert_close(lower, wanted.clamp(min=0))
