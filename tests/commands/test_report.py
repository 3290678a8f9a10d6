"""`lit-knn report` puts runs side by side: the paper's table of times, distances, and the settings that differ."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from lit_knn.callbacks import RunRecord
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.report_runs import read_run
from lit_knn.common.tables import write_rows
from lit_knn.data import Digits
from lit_knn.runs.clock import TrainingTime
from lit_knn.runs.record import Record
from main import main
from tests.command_lines import DEMO, TINY, refusal_of

pytestmark = pytest.mark.usefixtures("own_folder")


def leave_run(
    name,
    estimator,
    seconds=1.0,
    images=1000,
    estimator_seconds=0.0,
    lr=1e-4,
    distances=(),
    **options,
):
    """Leave the folder of a run; `distances` are (images seen, FID)."""
    folder = Path(name)
    folder.mkdir()
    resumed_from = options.pop("resumed_from", None)
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    model = {"class_path": "lit_knn.modules.LitICT", "init_args": {"lr": lr, "estimator": config}}
    config = {"model": model, "data": {"batch_size": 8}, "trainer": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    time = TrainingTime(seconds, images, estimator_seconds, ("8 x A100",))
    data = {
        "class": "Arrays",
        "images": 60_000,
        "shape": [1, 8, 8],
        "hflip": True,
        "fingerprint": "0123456789ab",
    }
    record = Record(time=time, images_seen=images, step=9, status="finished", data=data)
    record.resumed_from = resumed_from
    record.write(folder)
    if distances:
        write_rows(
            folder / "fidelity.csv", [{"images_seen": seen, "fid": fid} for seen, fid in distances]
        )
    return name


def report(capsys, *args):
    """The report's cells by the first cell of each row, and what is printed."""
    capsys.readouterr()
    main(["report", *args, "--overwrite"])
    printed = capsys.readouterr().out
    assert Path("report.md").read_text() in printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return {row[0]: row[1:] for row in rows}, printed


def test_the_table_of_the_paper(capsys):
    # Hours of tab:consistency_runtime, with its percentages.
    paths = [
        leave_run("knn", "KNN", 220.5 * 3600, 409_600_000, 30 * 3600, k=2048, n=256),
        leave_run("ict", "OneSample", 188.9 * 3600, 409_600_000),
        leave_run("stf", "STF", 185.8 * 3600, 409_600_000, n=None),  # the default, 256
    ]
    few = json.loads(
        Path(leave_run("few", "KNN", 100.0, 20_000, 40.0, k=None, n=None), "run.json").read_text()
    )
    few["data"]["images"] = 1797  # fewer than the default k
    Path("few/run.json").write_text(json.dumps(few))
    few = read_run("few").curve
    # the estimator's and the rest
    assert (few.method, few.ms_per_image) == ("KNN k=1797, n=256", (2, 3))
    rows, printed = report(capsys, *paths)
    assert rows["estimator"] == ["KNN k=2048, n=256", "OneSample", "STF n=256"]
    assert rows["hours of training"] == ["220", "189", "186"]
    assert rows["time per image"] == ["116.7%", "100.0%", "98.4%"]
    assert rows["images/s"][0] == "516"
    assert rows["estimator's share"] == ["13.6%", "0.0%", "0.0%"]
    assert rows["hardware"][0] == "8 x A100"
    assert rows["data"][0] == "Arrays 30,000 x 1x8x8 and their mirror images (01234567)"
    assert "relative to ict (OneSample)" in printed


def test_report_has_best_and_last_distance_and_more_samples_win(capsys):
    a, b = leave_run("a", "STF"), leave_run("b", "KNN", distances=[(100, 9.0)])
    places = {"num_samples": 9, "checkpoint": "x"}
    values = [(100, 5.0, 0.5), (200, 3.0, 0.7), (300, 4.0, 0.6)]
    rows = [
        {"images_seen": seen, "fid": fid, "precision": precision, **places}
        for seen, fid, precision in values
    ]
    write_rows("a/fidelity.csv", rows)
    write_rows("b/checkpoints_fid.csv", [{"images_seen": 100, "fid": 2.5}])
    rows, _ = report(capsys, a, b)
    assert rows["FID"] == ["3 at 200, at the end 4", "2.5 at 100"]
    assert rows["precision"] == ["0.7 at 200, at the end 0.6", "-"]
    with Image.open("report.png") as picture:
        assert picture.size[0] > 2000
    # A later table without values of a metric hides none of an earlier one.
    # A deviation is no metric.
    write_rows(
        "b/fidelity.csv",
        [{"images_seen": 100, "fid": 9.0, "kid": 0.1, "kid_std": 1, "kid_std_held_out": 1}],
    )
    write_rows("b/checkpoints_fid.csv", [{"images_seen": 100, "fid": 2.5, "kid": ""}])
    assert read_run(b).curve.distances == {"fid": [(100, 2.5)], "kid": [(100, 0.1)]}


def test_runs_of_unequal_length_are_compared_where_all_measured(capsys):
    leave_run("short", "STF", 100.0, 1000, distances=[(100, 9.0), (200, 5.0)])
    leave_run("long", "STF", 400.0, 2000, distances=[(100, 8.0), (200, 6.0), (300, 1.0)])
    leave_run("rare", "STF", distances=[(100, 7.0), (150, 2.0)])
    rows, _ = report(capsys, "short", "long", "rare", leave_run("other", "STF"))
    assert rows["FID at 100 images"] == ["9", "8", "7", "-"]
    rows, printed = report(capsys, "short", "long")
    assert rows["FID at 200 images"] == ["5", "6"]
    assert rows["time per image"] == ["100.0%", "200.0%"]
    assert "Trainings of other seeds" in printed
    # One run is compared with none.
    _, printed = report(capsys, "short")
    assert " images |" not in printed
    assert "other seeds" not in printed
    rows, _ = report(capsys, leave_run("stopped before its first step", "STF", 0.0, images=0))
    assert (rows["images/s"], rows["time per image"]) == (["-"], ["-"])


def test_a_resumed_run_has_the_distances_of_its_earlier_parts(capsys):
    checkpoint = None
    for name, images, fid in (("a", 100, 3.0), ("b", 200, 4.0), ("c", 300, 5.0)):
        leave_run(name, "STF", resumed_from=checkpoint, distances=[(images, fid)])
        checkpoint = f"{name}/checkpoints/last.ckpt"
    rows, _ = report(capsys, "c", "a")
    assert rows["FID"] == ["3 at 100, at the end 5", "3 at 100"]
    # "d" branches off "a" after 100 images. What "a" measured later is not of "d".
    points = [(100, 3.0), (200, 1.0), (300, 1.5)]
    write_rows(
        "a/fidelity.csv", [{"images_seen": seen, "fid": fid, "kid": 0.1} for seen, fid in points]
    )
    leave_run(
        "d",
        "STF",
        resumed_from="a/checkpoints/images_seen=100.ckpt",
        distances=[(150, 2.5), (250, 2.0)],
    )
    assert read_run("d").curve.distances == {
        "fid": [(100, 3.0), (150, 2.5), (250, 2.0)],
        "kid": [(100, 0.1)],
    }
    # The checkpoint tells where "f" begins, before it has measured anything.
    Path("a/checkpoints").mkdir()
    torch.save({"images_seen": 100}, "a/checkpoints/last.ckpt")
    leave_run("f", "STF", resumed_from="a/checkpoints/last.ckpt")
    assert read_run("f").curve.distances == {"fid": [(100, 3.0)], "kid": [(100, 0.1)]}
    with pytest.warns(
        UserWarning, match="e was resumed from gone/checkpoints/last.ckpt, whose run is not there"
    ):
        read_run(leave_run("e", "STF", resumed_from="gone/checkpoints/last.ckpt"))


def test_settings_that_differ_are_listed_and_others_are_not(capsys):
    a, b = leave_run("a", "STF", n=64), leave_run("b", "STF", n=256, lr=3e-4)
    record = json.loads(Path("b/run.json").read_text())
    record["packages"]["torch"] = "9.9"
    record["processes"] = 8
    Path("b/run.json").write_text(json.dumps(record))
    rows, printed = report(capsys, a, b)
    assert rows["model.estimator.n"] == ["64", "256"]
    assert rows["model.lr"] == ["0.0001", "0.0003"]
    assert rows["torch"][1] == "9.9"
    assert rows["processes"] == ["1", "8"]
    assert "batch_size" not in printed
    assert "numpy" not in printed


def test_report_names_what_it_cannot_read_in_one_line(capsys):
    assert "nowhere/config.yaml does not exist" in refusal_of(["report", "nowhere"], capsys)
    run = leave_run("a", "STF", distances=[(1000, 3.5)])
    whole = Path("a/run.json").read_text()
    for damaged in ('{"status": 3', "{}"):
        Path("a/run.json").write_text(damaged)
        assert "run.json is damaged" in refusal_of(["report", run], capsys)
    Path("a/run.json").unlink()
    assert "lit_knn.callbacks.RunRecord writes it" in refusal_of(["report", run], capsys)
    Path("a/run.json").write_text(whole)
    table = Path("a/fidelity.csv").read_bytes()
    Path("a/fidelity.csv").write_bytes(table.replace(b",", b";"))  # A spreadsheet has saved it.
    assert "a/fidelity.csv cannot be read: " in refusal_of(["report", run], capsys)
    Path("a/fidelity.csv").write_bytes(b"\xef\xbb\xbf" + table)
    Path("mine.png").write_text("precious")
    assert "mine.png is of another report, and stays" in refusal_of(
        ["report", run, "--output", "mine"], capsys
    )
    assert sorted(path.name for path in Path().iterdir()) == ["a", "mine.png"]
    main(["report", run, "--output", "mine.md", "--overwrite"])
    assert Path("mine.png").read_bytes().startswith(b"\x89PNG")
    # A report that was interrupted is printed again, and goes on.
    first = capsys.readouterr().out
    Path("mine.pdf").unlink()
    main(["report", run, "--output", "mine"])
    assert capsys.readouterr().out == first
    assert Path("mine.pdf").exists()


def test_a_terminal_without_accents_gets_its_table(trained_run, monkeypatch):
    shutil.copytree(trained_run("edm")[0], "run")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["report", "run"])
    sys.stdout.flush()
    assert rb"| Fr\xe9chet distance on pixels |" in sys.stdout.buffer.getvalue()


def test_the_record_of_a_run_of_the_demo(capsys):
    args = [
        "fit",
        "-c",
        DEMO,
        *TINY,
        "--data.batch_size",
        "16",
        "--trainer.val_check_interval",
        "2",
    ]
    main([*args, "--trainer.max_steps", "2"])
    folder = Path("runs/demo/knn_0")
    record = json.loads((folder / "run.json").read_text())
    data = Digits(batch_size=16)
    data.setup("fit")
    assert record["status"] == "finished"
    assert (record["step"], record["images_seen"], record["time"]["images"]) == (2, 32, 32)
    told = {"class": "Digits", "images": 1797, "shape": [1, 8, 8], "hflip": False}
    assert record["data"] == told | {"fingerprint": data.reference.fingerprint()}
    assert record["packages"]["torch"] == torch.__version__.split("+")[0]
    assert 0 < record["time"]["seconds"] < record["wall_seconds"]
    # The system counts this process's largest memory in KiB.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert record["memory_gb"] == pytest.approx(peak / 1e9, rel=0.03)
    # The record of every part of the run tells where the part started.
    last = folder / "checkpoints" / "last.ckpt"
    resumed = [
        "--trainer.logger.version",
        "knn_1",
        "--trainer.max_steps",
        "4",
        "--ckpt_path",
        str(last),
    ]
    cli = make_cli([*args, *resumed])
    assert sum(isinstance(callback, RunRecord) for callback in cli.trainer.callbacks) == 1
    record = json.loads((folder.parent / "knn_1" / "run.json").read_text())
    assert record["resumed_from"] == str(last)
    assert (record["step"], record["images_seen"]) == (4, 64)
    rows, _ = report(capsys, str(folder), str(folder.parent / "knn_1"))
    assert rows["steps"] == ["2", "4"]
    assert rows["ckpt_path"] == ["-", str(last)]
