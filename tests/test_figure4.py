"""Figure 4 from the tables of training runs."""

import pytest
import yaml
from matplotlib.figure import Figure

from lit_knn.common.errors import InputError
from lit_knn.common.tables import write_rows
from lit_knn.figures import figure4
from lit_knn.figures.figure4.__main__ import main
from lit_knn.figures.figure4.curves import Curve, read_curves
from lit_knn.figures.style import log_values


def leave_run(folder, estimator, values, **options):
    folder.mkdir(parents=True)
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"estimator": config}}}))
    write_rows(
        folder / "fidelity.csv", [{"images_seen": str(at), "fid": str(v), "kid": ""} for at, v in values.items()]
    )
    return folder


@pytest.fixture
def runs(tmp_path):
    return [
        leave_run(tmp_path / "0", "OneSample", {1000000: 9.0, 2000000: 4.0, 3000000: 5.0}),
        leave_run(tmp_path / "1", "KNN", {1000000: 8.0}, k=2048, n=256),
        # The same training, resumed.
        leave_run(tmp_path / "2", "KNN", {2000000: 3.5, 3000000: 3.0}, k=2048, n=256),
        leave_run(tmp_path / "3", "KNN", {1000000: 3.0, 2000000: 2.5}, k=512, n=256),
        leave_run(tmp_path / "4", "KNN", {1000000: 7.0, 2000000: 4.5}, k=2048, n=64),
        leave_run(tmp_path / "5", "KNN", {1000000: 7.0, 2000000: 4.5}, k=64, n=8),
    ]


def test_curves_are_named_by_the_configs_and_resumed_runs_joined(runs):
    curves = {(curve.estimator, curve.k, curve.n): curve for curve in read_curves(runs, "fid")}
    assert len(curves) == 5
    joined = curves["KNN", 2048, 256]
    assert joined.points == [(1000000, 8.0), (2000000, 3.5), (3000000, 3.0)]
    assert joined.best == 3.0
    assert curves["OneSample", None, None].best == 4.0


def test_null_in_a_config_is_the_default(tmp_path):
    folders = [
        leave_run(tmp_path / "0", "KNN", {1000000: 8.0}, k=None, n=None, include_source=False),
        leave_run(tmp_path / "1", "KNN", {2000000: 3.5}, k=2048, n=256),
        leave_run(tmp_path / "2", "STF", {1000000: 8.0}, n=None),
        leave_run(tmp_path / "3", "Network", {1000000: 8.0}, path="x", net=None),
    ]
    curves = {(curve.estimator, curve.k, curve.n): len(curve.points) for curve in read_curves(folders, "fid")}
    assert curves == {("KNN", 2048, 256): 2, ("STF", None, 256): 1, ("Network", None, None): 1}


def test_other_values_at_the_same_images_are_another_run(tmp_path):
    folders = [
        leave_run(tmp_path / name, "KNN", {1000000: value}, k=8, n=4) for name, value in (("a", 9.0), ("b", 8.0))
    ]
    with pytest.raises(InputError, match=r"b has another fid at 1000000 images than a folder before it .*KNN 8 4"):
        read_curves(folders, "fid")


def test_of_a_score_the_highest_is_the_best():
    higher = Curve("KNN", 8, 4, "inception_score", [(1, 7.0), (2, 9.0), (3, 8.0)])
    lower = Curve("OneSample", None, None, "inception_score", [(1, 6.0), (2, 7.5)])
    assert higher.best == 9.0
    assert higher.passes(lower) == 2
    assert lower.passes(higher) is None


def lines(ax, style):
    return [line for line in ax.get_lines() if line.get_linestyle() == style]


def test_each_panel_varies_one_option_and_marks_where_the_baseline_is_passed(runs):
    upper, lower = figure4(read_curves(runs, "fid"), "fid").axes
    labels = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in (upper, lower)]
    assert labels[0] == ["OneSample", "KNN k=512, n=256", "KNN k=2048, n=256"]
    assert labels[1] == ["OneSample", "KNN k=2048, n=64", "KNN k=2048, n=256"]
    assert [line.get_ydata()[0] for line in lines(upper, ":")] == [4.0, 2.5, 3.0]
    # k=512 falls below 4 after one million images, k=2048 after two, n=64 never.
    assert [line.get_xdata()[0] for line in lines(upper, "--")] == [1.0, 2.0]
    assert [line.get_xdata()[0] for line in lines(lower, "--")] == [2.0]


def test_pictures_are_written_and_not_overwritten(runs, tmp_path, capsys):
    output = str(tmp_path / "out")
    main([*map(str, runs), "--output", output])
    assert capsys.readouterr().out.split() == [f"{output}.png", f"{output}.pdf"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(SystemExit):
        main([*map(str, runs), "--output", output])
    assert "out.png is there already" in capsys.readouterr().err


def test_what_cannot_be_drawn_is_said_in_one_line(runs, tmp_path, capsys):
    def complaint(*args):
        with pytest.raises(SystemExit) as stop:
            main([*args, "--output", str(tmp_path / "out")])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no such file; give the folders of training runs" in complaint(str(tmp_path))
    assert "has no values of --metric kid" in complaint(str(runs[0]), "--metric", "kid")
    (runs[1] / "fidelity.csv").write_text("images_seen,fid\n1,2\n3")
    assert "line 3" in complaint(str(runs[1]))
    (runs[2] / "fidelity.csv").unlink()
    assert "the run must have lit_knn.callbacks.Fidelity" in complaint(str(runs[2]))
    (runs[3] / "config.yaml").write_text("model: 3")
    assert "tells no model.init_args.estimator" in complaint(str(runs[3]))


@pytest.mark.parametrize("values", [(0.064, 0.074), (0.5, 1.2), (0.3, 700.0)])
def test_the_numbers_of_a_logarithmic_axis_differ(values):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], values)
    log_values(axes)
    figure.canvas.draw()
    low, high = axes.get_ylim()
    ticks = zip(axes.yaxis.get_ticklocs(), axes.yaxis.get_majorticklabels(), strict=True)
    minor = zip(axes.yaxis.get_ticklocs(minor=True), axes.yaxis.get_minorticklabels(), strict=True)
    shown = [
        (place, label.get_text()) for place, label in (*ticks, *minor) if low <= place <= high and label.get_text()
    ]
    assert len(shown) >= 2
    for place, text in shown:
        assert float(text.replace("−", "-")) == pytest.approx(place, rel=1e-6)
