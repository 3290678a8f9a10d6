"""Figure 4 from the folders of training runs, by `lit-knn report`."""

import pytest
import yaml
from PIL import Image

from lit_knn.commands.report import read_run
from lit_knn.common.tables import write_rows
from lit_knn.figures import figure4
from lit_knn.figures.training_curves import TrainingCurve, best_point, passes, varied
from lit_knn.runs.record import Record
from main import main


def leave_run(folder, estimator, values, **options):
    folder.mkdir(parents=True)
    config = {"class_path": f"lit_knn.estimators.{estimator}", "init_args": options}
    config = {"model": {"init_args": {"estimator": config}}, "data": {}, "trainer": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    Record(status="finished").write(folder)
    write_rows(
        folder / "fidelity.csv", [{"images_seen": str(at), "fid": str(v), "kid": ""} for at, v in values.items()]
    )
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    return [
        leave_run(tmp_path / "0", "OneSample", {1000000: 9.0, 2000000: 4.0, 3000000: 5.0}),
        leave_run(tmp_path / "1", "KNN", {1000000: 8.0, 2000000: 3.5, 3000000: 3.0}, k=2048, n=256),
        leave_run(tmp_path / "2", "KNN", {1000000: 3.0, 2000000: 2.5}, k=512, n=256),
        leave_run(tmp_path / "3", "KNN", {1000000: 7.0, 2000000: 4.5}, k=2048, n=64),
        leave_run(tmp_path / "4", "KNN", {1000000: 7.0, 2000000: 4.5}, k=64, n=8),
    ]


def test_a_panel_has_the_runs_with_the_commonest_other_option_or_the_larger_one_of_a_tie():
    runs = [TrainingCurve(f"{k} {n}", "KNN", k, n) for n in (256, 64) for k in (512, 64)]
    assert [(run.k, run.n) for run in varied(runs, "k")] == [(64, 256), (512, 256)]
    runs.append(TrainingCurve("more", "KNN", 8, 64))
    assert [(run.k, run.n) for run in varied(runs, "k")] == [(8, 64), (64, 64), (512, 64)]
    assert [(run.k, run.n) for run in varied(runs, "n")] == [(512, 64), (512, 256)]


def test_of_a_score_the_highest_is_the_best():
    higher, lower = [(1, 7.0), (2, 9.0), (3, 8.0)], [(1, 6.0), (2, 7.5)]
    assert best_point(higher, "inception_score") == (2, 9.0)
    assert passes(higher, lower, "inception_score") == 2
    assert passes(lower, higher, "inception_score") is None
    assert passes(lower, lower, "inception_score") is None


def lines(ax, style):
    return [line for line in ax.get_lines() if line.get_linestyle() == style]


def test_each_panel_varies_one_option_and_marks_where_the_baseline_is_passed(runs):
    upper, lower = figure4([read_run(run).curve for run in runs]).axes
    labels = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in (upper, lower)]
    assert labels[0] == ["OneSample", "KNN k=512, n=256", "KNN k=2048, n=256"]
    assert labels[1] == ["OneSample", "KNN k=2048, n=64", "KNN k=2048, n=256"]
    assert [line.get_ydata()[0] for line in lines(upper, ":")] == [4.0, 2.5, 3.0]
    # k=512 falls below 4 after one million images, k=2048 after two, n=64 never.
    assert [line.get_xdata()[0] for line in lines(upper, "--")] == [1.0, 2.0]
    assert [line.get_xdata()[0] for line in lines(lower, "--")] == [2.0]


def test_the_report_draws_it_if_k_or_n_differ(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["report", *runs, "--output", "out"])
    written = ["out.md", "out.png", "out.pdf", "out_figure4.png", "out_figure4.pdf"]
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {', '.join(written)}"
    with Image.open("out_figure4.png") as picture:
        assert picture.size == (1200, 1400)
    assert (tmp_path / "out_figure4.pdf").read_bytes().startswith(b"%PDF")
    main(["report", *runs[:2], "--output", "two"])
    assert not list(tmp_path.glob("two_figure4*"))
    with pytest.raises(SystemExit):
        main(["report", *runs[1:], "--output", "out"])
    assert "out.md is of another report" in capsys.readouterr().err
