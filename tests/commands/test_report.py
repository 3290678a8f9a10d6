"""`main.py report` puts runs side by side: the paper's table of times, distances, and the settings that differ."""

import json

import pytest
import yaml
from PIL import Image

from lit_knn.callbacks import RunRecord
from lit_knn.commands.report import read_run
from lit_knn.common.tables import write_rows
from lit_knn.figures import run_comparison
from lit_knn.runs.clock import TrainingTime
from lit_knn.runs.record import Record
from main import main, make_cli


def leave_run(folder, estimator, seconds, images=1000, estimator_seconds=0.0, lr=1e-4, **options):
    folder.mkdir()
    resumed_from = options.pop("resumed_from", None)
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    model = {"class_path": "lit_knn.modules.LitICT", "init_args": {"lr": lr, "estimator": config}}
    config = {"model": model, "data": {"batch_size": 8}, "trainer": {}, "ckpt_path": resumed_from}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    time = TrainingTime(seconds, images, estimator_seconds, ("8 x A100",))
    record = Record(time=time, images_seen=images, step=9, status="finished")
    record.write(folder)
    return str(folder)


def report(tmp_path, monkeypatch, capsys, *args):
    """The report's cells, by table and by the first cell of each row."""
    monkeypatch.chdir(tmp_path)
    for path in tmp_path.glob("report.*"):
        path.unlink()
    main(["report", *args])
    printed = capsys.readouterr().out
    assert (tmp_path / "report.md").read_text() in printed
    rows = [
        [cell.strip() for cell in line.strip("|").split(" |")] for line in printed.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}, printed


def refusal(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["report", *args])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_table_of_the_paper(tmp_path, monkeypatch, capsys):
    # Hours of tab:consistency_runtime, with its percentages.
    paths = [
        leave_run(tmp_path / "knn", "KNN", 220.5 * 3600, 409_600_000, 30 * 3600, k=2048, n=256),
        leave_run(tmp_path / "ict", "OneSample", 188.9 * 3600, 409_600_000),
        leave_run(tmp_path / "stf", "STF", 185.8 * 3600, 409_600_000, n=256),
    ]
    rows, printed = report(tmp_path, monkeypatch, capsys, *paths)
    assert rows["estimator"] == ["KNN k=2048, n=256", "OneSample", "STF n=256"]
    assert rows["hours of training"] == ["220", "189", "186"]
    assert rows["time per image"] == ["116.7%", "100.0%", "98.4%"]
    assert rows["images/s"][0] == "516"
    assert rows["estimator's share"] == ["13.6%", "0.0%", "0.0%"]
    assert rows["hardware"][0] == "8 x A100"
    assert f"relative to {paths[1]} (OneSample)" in printed


def test_distances_are_the_best_and_the_last_and_more_samples_win(tmp_path, monkeypatch, capsys):
    a, b = leave_run(tmp_path / "a", "STF", 1.0), leave_run(tmp_path / "b", "KNN", 1.0)
    write_rows(
        tmp_path / "a" / "fidelity.csv",
        [
            {"images_seen": 100, "num_samples": 9, "fid": 5.0, "precision": 0.5, "checkpoint": "x"},
            {"images_seen": 200, "num_samples": 9, "fid": 3.0, "precision": 0.7, "checkpoint": "x"},
            {"images_seen": 300, "num_samples": 9, "fid": 4.0, "precision": 0.6, "checkpoint": "x"},
        ],
    )
    write_rows(tmp_path / "b" / "fidelity.csv", [{"images_seen": 100, "fid": 9.0}])
    write_rows(tmp_path / "b" / "checkpoints_fid.csv", [{"images_seen": 100, "fid": 2.5}])
    rows, _ = report(tmp_path, monkeypatch, capsys, a, b)
    assert rows["FID"] == ["3 at 200, at the end 4", "2.5 at 100"]
    assert rows["precision"] == ["0.7 at 200, at the end 0.6", "-"]
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.size[0] > 2000


def test_runs_of_unequal_lengths_are_compared_where_all_were_measured(tmp_path, monkeypatch, capsys):
    tables = {
        "short": [(100, 9.0), (200, 5.0)],
        "long": [(100, 8.0), (200, 6.0), (300, 1.0)],
        "rare": [(100, 7.0), (150, 2.0)],
        "other": [],
    }
    paths = {name: leave_run(tmp_path / name, "STF", 1.0) for name in tables}
    for name, points in tables.items():
        if points:
            write_rows(tmp_path / name / "fidelity.csv", [{"images_seen": seen, "fid": fid} for seen, fid in points])
    rows, printed = report(tmp_path, monkeypatch, capsys, *paths.values())
    assert rows["FID at 100 images"] == ["9", "8", "7", "-"]
    rows, _ = report(tmp_path, monkeypatch, capsys, paths["short"], paths["long"])
    assert rows["FID at 200 images"] == ["5", "6"]
    assert "Trainings of other seeds" in printed
    _, printed = report(tmp_path, monkeypatch, capsys, paths["short"])
    # One run is compared with none.
    assert " images |" not in printed
    assert "other seeds" not in printed


def test_a_resumed_run_has_the_distances_of_its_earlier_parts(tmp_path, monkeypatch, capsys):
    checkpoints = [None]
    for name, images, fid in (("a", 100, 3.0), ("b", 200, 4.0), ("c", 300, 5.0)):
        leave_run(tmp_path / name, "STF", 1.0, resumed_from=checkpoints[-1])
        checkpoints.append(str(tmp_path / name / "checkpoints" / "last.ckpt"))
        write_rows(tmp_path / name / "fidelity.csv", [{"images_seen": images, "fid": fid}])
    rows, _ = report(tmp_path, monkeypatch, capsys, str(tmp_path / "c"), str(tmp_path / "a"))
    assert rows["FID"] == ["3 at 100, at the end 5", "3 at 100"]


def test_the_picture_has_the_distances_over_millions_of_images_and_the_time_of_each_part(tmp_path):
    run = leave_run(tmp_path / "a", "STF", 100.0, 20_000, estimator_seconds=40.0)
    points = [{"images_seen": 1_000_000 * i, "fid": 9.0 / i} for i in (1, 2, 3)]
    write_rows(tmp_path / "a" / "fidelity.csv", points)
    panel, bars = run_comparison([read_run(run).curve]).axes
    assert panel.get_xlabel() == "Training images seen (millions)"
    (line,) = panel.get_lines()
    assert line.get_xydata().tolist() == [[1, 9], [2, 4.5], [3, 3]]
    # 5 ms for each image, 2 of them in the estimator.
    parts = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars.patches)
    assert parts == [(0, 3), (3, 5)]


def test_settings_that_differ_are_listed_and_others_are_not(tmp_path, monkeypatch, capsys):
    a, b = leave_run(tmp_path / "a", "STF", 1.0, n=64), leave_run(tmp_path / "b", "STF", 1.0, n=256, lr=3e-4)
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    record["packages"]["torch"] = "9.9"
    record["processes"] = 8
    (tmp_path / "b" / "run.json").write_text(json.dumps(record))
    rows, printed = report(tmp_path, monkeypatch, capsys, a, b)
    assert rows["model.estimator.n"] == ["64", "256"]
    assert rows["model.lr"] == ["0.0001", "0.0003"]
    assert rows["torch"][1] == "9.9"
    assert rows["processes"] == ["1", "8"]
    assert "batch_size" not in printed
    assert "numpy" not in printed


def test_runs_of_other_lengths_are_compared_by_the_image(tmp_path, monkeypatch, capsys):
    short = leave_run(tmp_path / "short", "STF", 100.0, 1000)
    long = leave_run(tmp_path / "long", "KNN", 400.0, 2000)
    rows, _ = report(tmp_path, monkeypatch, capsys, short, long)
    assert rows["time per image"] == ["100.0%", "200.0%"]


@pytest.mark.parametrize("damage", ['{"status": 3', "{}"])
def test_what_cannot_be_read_is_said_in_one_line(damage, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "nowhere/config.yaml does not exist" in refusal(capsys, "nowhere")
    run = leave_run(tmp_path / "a", "STF", 1.0)
    (tmp_path / "a" / "run.json").write_text(damage)
    assert "run.json is damaged" in refusal(capsys, run)
    (tmp_path / "a" / "run.json").unlink()
    assert "lit_knn.callbacks.RunRecord writes it" in refusal(capsys, run)


def test_nothing_is_overwritten_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = leave_run(tmp_path / "a", "STF", 1.0)
    (tmp_path / "mine.png").write_text("precious")
    assert "mine.png is of another report, and stays" in refusal(capsys, run, "--output", "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine.png"]
    main(["report", run, "--output", "mine", "--overwrite"])
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert "# Training runs" in (tmp_path / "mine.md").read_text()


def test_the_record_of_a_run_of_the_demo(tmp_path, monkeypatch, capsys):
    import torch

    from lit_knn.data import Digits

    args = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.net.channels", "4"]
    args += ["-c", "tests/tiny.yaml", "--trainer.logger.save_dir", str(tmp_path)]
    main(["fit", "-c", "configs/demo.yaml", *args, "--data.batch_size", "16"])
    folder = tmp_path / "demo" / "knn_0"
    record = json.loads((folder / "run.json").read_text())
    data = Digits(batch_size=16)
    data.setup("fit")
    assert record["status"] == "finished"
    assert (record["step"], record["images_seen"], record["time"]["images"]) == (2, 32, 32)
    assert record["data"] == {
        "class": "Digits", "images": 1797, "shape": [1, 8, 8], "hflip": False,
        "fingerprint": data.reference.fingerprint(),
    }  # fmt: skip
    assert record["packages"]["torch"] == torch.__version__.split("+")[0]
    assert 0 < record["time"]["seconds"] < record["wall_seconds"]
    assert record["memory_gb"] > 0.1
    # The record of every part of the run tells where the part started.
    last = folder / "checkpoints" / "last.ckpt"
    args += ["--data.batch_size", "16", "--trainer.logger.version", "knn_1"]
    cli = make_cli(["fit", "-c", "configs/demo.yaml", *args, "--trainer.max_steps", "4", "--ckpt_path", str(last)])
    assert sum(isinstance(callback, RunRecord) for callback in cli.trainer.callbacks) == 1
    record = json.loads((tmp_path / "demo" / "knn_1" / "run.json").read_text())
    assert record["resumed_from"] == str(last)
    assert (record["step"], record["images_seen"]) == (4, 64)
    capsys.readouterr()
    rows, _ = report(tmp_path, monkeypatch, capsys, str(folder), str(folder.parent / "knn_1"))
    assert rows["steps"] == ["2", "4"]
    assert rows["ckpt_path"] == ["-", str(last)]


def test_a_table_without_values_of_a_metric_hides_none(tmp_path):
    run = leave_run(tmp_path / "a", "STF", 1.0)
    write_rows(tmp_path / "a" / "fidelity.csv", [{"images_seen": 100, "fid": 9.0, "kid": 0.1}])
    write_rows(tmp_path / "a" / "checkpoints_fid.csv", [{"images_seen": 100, "fid": 2.5, "kid": ""}])
    assert read_run(run).curve.distances == {"fid": [(100, 2.5)], "kid": [(100, 0.1)]}


def test_a_run_that_was_stopped_before_its_first_step(tmp_path, monkeypatch, capsys):
    rows, _ = report(tmp_path, monkeypatch, capsys, leave_run(tmp_path / "a", "STF", 0.0, images=0))
    assert (rows["images/s"], rows["time per image"]) == (["-"], ["-"])
