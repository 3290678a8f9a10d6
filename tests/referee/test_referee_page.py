"""The page of the referee: Pareto front, formats, and what a reader finds in Markdown and pictures."""

import csv
import json
import math
import re
import shlex

import pytest
from matplotlib.container import ErrorbarContainer

from lit_knn.commands.referee import options_of
from lit_knn.referee.page import content, markdown, write_page
from lit_knn.referee.page.front import ranked
from lit_knn.referee.page.pictures import error_against_time
from lit_knn.referee.page.results import read_results
from lit_knn.referee.table import COLUMNS
from tests import ROOT


def row(name="KNN", t=1.0, mse=1e-4, time=1.0, k=64, **changes):
    """One row of a table, with `mse` relative to a reference estimator of error 1e-3."""
    settings = {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": k}}
    measured = {"mse": mse, "bias_sq": mse / 2, "variance": mse / 2, "score_mse": mse / t**4, "mse_ratio": mse / 1e-3}
    return (
        dict.fromkeys(COLUMNS, "")
        | {"protocol": "1", "case": "digits", "data": "0123456789ab", "N": 1797, "d": 64, "name": name, "t": t}
        | {"settings": json.dumps(settings), "origin": "lit_knn", "cpu": "some CPU", "cores": 2, "memory_gb": 8}
        | {key: value for name, of in measured.items() for key, value in ((name, of), (f"{name}_se", of / 10))}
        | {"time_ratio": time, "time_ratio_low": 0.9 * time, "time_ratio_high": 1.2 * time}
        | {"reference_ms": 2, "ms": 2 * time}
        | {"repeats_itself": "yes", "needs_source": "no"}
        | {"latents": 64, "repeats": 4, "batch": 32, "threads": 2, "date": "2026-01-02"}
        | changes
    )


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def results_of(tmp_path, rows):
    (results,) = read_results([table(tmp_path / "results.csv", rows)])
    return results, ranked(results)


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_the_pages_of_the_documentation_are_made_of_their_rows(name):
    results = read_results([ROOT / f"docs/referee/{name}.csv"])
    text = content.page([(own, ranked(own), name) for own in results])
    assert text == (ROOT / f"docs/referee/{name}.md").read_text()
    # The commands of the page repeat a row only with options that there are. An adapter needs its checkout.
    for entry in (entry for own in results for entry in own.entries if entry.facts["origin"] != "adapter"):
        estimator = options_of(shlex.split(content.command(entry))[3:]).estimator
        assert type(estimator).__name__ == json.loads(entry.facts["settings"])["class_path"].rpartition(".")[2]


def test_places_are_fronts_of_the_rest_and_incomplete_entries_come_last(tmp_path):
    rows = [row("slow", mse=1e-5, time=9), row("fast", mse=1e-2, time=0.1), row("beaten", mse=1e-2, time=0.2)]
    rows += [row("beaten twice", mse=1e-2, time=0.3), row("failed", mse=math.nan, time=0.01)]
    rows += [row("as fast", mse=1e-2, time=0.1), row("as slow", mse=1e-4, time=9)]
    _, order = results_of(tmp_path, rows)
    expected = ["fast", "as fast", "slow", "beaten", "as slow", "beaten twice", "failed"]
    assert [r.entry.name for r in order] == expected
    assert [r.place for r in order] == [1, 1, 1, 2, 2, 3, None]
    assert [r.front for r in order] == [{1.0}] * 3 + [set()] * 4


def test_the_error_over_all_levels_is_the_worst_and_the_time_the_mean(tmp_path):
    rows = [row("a", t, mse, time) for t, mse, time in ((1.0, 1e-3, 1), (2.0, 9e-3, 2), (3.0, 2e-3, 6))]
    _, (entry,) = results_of(tmp_path, rows)
    assert (entry.error, entry.time) == (pytest.approx(9), 3)
    # The error bar is that of the worst level.
    figure = error_against_time(*results_of(tmp_path, [*rows[::2], rows[1] | {"mse_ratio_se": 3}]))
    (reach,) = figure.axes[0].containers[0].lines[2][1].get_segments()
    assert reach[:, 1] == pytest.approx([6, 12])
    # At t = 1 all are exact to rounding, the reference, too. At t = 2 the ratio is 0.1 for both.
    rows = [row(n, 1.0, mse, time, mse_ratio=mse / 1e-20) for n, mse, time in (("fast", 1e-18, 1), ("slow", 1e-30, 2))]
    rows += [row("fast", 2.0, 1e-4, 1), row("slow", 2.0, 1e-4, 2)]
    _, (fast, slow) = results_of(tmp_path, rows)
    assert (fast.entry.name, fast.place, slow.place) == ("fast", 1, 2)
    assert fast.error == slow.error == pytest.approx(0.1)
    assert (fast.front, slow.front) == ({1.0, 2.0}, set())


def test_files_merge_settings_and_machines_are_told_apart_and_later_rows_win(tmp_path):
    rows = [row(mse=1e-5), row(mse=2e-5, date="2026-03-01"), row(mse=3e-5, date="2026-02-01"), row(mse=4e-5, k=65)]
    rows += [row(mse=0.0, cpu="another CPU"), row(mse=1e-6, mse_ratio_se=2e-3, case="toy2d")]
    digits, toy2d = read_results([table(tmp_path / "a.csv", rows[:4]), table(tmp_path / "b.csv", rows[4:])])
    assert [r.case for r in (digits, toy2d)] == ["digits", "toy2d"]
    assert [entry.value(1.0, "mse") for entry in digits.entries] == [2e-5, 4e-5, 0]
    machines = re.findall(r"machine \w", content.ranking(digits, ranked(digits)))
    assert sorted(machines) == ["machine A", "machine A", "machine B"]
    written = content.page([(own, ranked(own), "page") for own in (digits, toy2d)])
    assert "- **Machine B:** another CPU, 2 cores" in written
    assert "- **Measured:** 2026-01-02 to 2026-03-01" in written
    # A mean that is not told from 0 is a limit.
    assert r"**\< 5.0e-3**" in written


def test_the_page_holds_every_entry_escaped(tmp_path):
    hostile = "<script>alert('*1*')</script> | $x$ `code`"
    rows = [row(name, t, mse, time) for t in (1.0, 5.0) for name, mse, time in (("KNN", 1e-3, 1), (hostile, 1e-4, 2))]
    for one in rows[1::2]:
        one |= {"origin": "adapter", "note": "a | b\n<b>c</b>"}
    written = write_page([table(tmp_path / "results.csv", rows)], tmp_path / "out" / "page")
    assert [path.name for path in written] == ["page.md", "page.png"]
    assert all(path.stat().st_size for path in written)
    text = written[0].read_text()
    assert "<script>" not in text.partition("### Commands")[0]
    assert markdown.escaped(hostile) in text
    assert r"a \| b \<b\>c\</b\>" in text
    assert "![Error against time, digits](page.png)" in text


def test_pictures_have_a_panel_for_each_level_error_bars_and_the_front(tmp_path):
    entries = ("a", 1e-2, 1), ("b", 1e-4, 2), ("c", 1e-3, 3)
    rows = [row(name, t, mse, time) for t in (1.0, 5.0) for name, mse, time in entries]
    rows[0] |= {"mse_se": 2e-2}
    figure = error_against_time(*results_of(tmp_path, rows))
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["all noise levels", "t = 1", "t = 5"]
    # A bar is cut above 0, which a logarithmic axis does not have.
    for axes, reach in zip(panels[1:], ((0.1, 3), (0.9, 1.1)), strict=True):
        bars = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
        assert len(bars) == 3
        (time,), (mse,) = bars[0].lines[0].get_data()
        (across,), (up,) = (lines.get_segments() for lines in bars[0].lines[2])
        assert across[:, 0] == pytest.approx([0.9 * time, 1.2 * time])
        assert up[:, 1] == pytest.approx([end * mse for end in reach])
        (front,) = [line for line in axes.lines if line.get_label() == "Pareto front"]
        # The step falls from the top at the fastest, then at each entry on the front; "c" is beaten by "b".
        assert (front.get_drawstyle(), list(front.get_xdata())[:3]) == ("steps-post", [1, 1, 2])
        assert list(front.get_ydata())[1:] == [1e-2, 1e-4, 1e-4]
        assert {text.get_text() for text in axes.texts} == {"1", "2", "3"}


def test_empty_columns_leave_pictures_and_pages_in_order(tmp_path):
    empty = {name: "" for name, value in row().items() if isinstance(value, float) and name != "t"}
    rows = [row("only one level", 1.0), row("known", 1.0, time=2), row("nothing", 5.0) | empty]
    rows += [row("known", 5.0, time=2, mse_se="")]
    results, entries = results_of(tmp_path, rows)
    figure = error_against_time(results, entries)
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert all(map(math.isfinite, (*axes.get_xlim(), *axes.get_ylim())))
    assert "nan" not in content.page([(results, entries, "page")])
