"""The page of the referee: Pareto front, formats, and what a reader finds in Markdown and pictures."""

import csv
import json
import math
import random
import re

import pytest
from matplotlib.container import ErrorbarContainer

from lit_knn.common.errors import InputError
from lit_knn.referee.cases import CASES
from lit_knn.referee.page import content, markdown, write_page
from lit_knn.referee.page.front import pareto_front, ranked
from lit_knn.referee.page.pictures import error_against_time, ratio_over_t
from lit_knn.referee.page.results import read_results
from lit_knn.referee.table import COLUMNS, NUMBERS


def row(name="KNN", t=1.0, mse=1e-4, time=1.0, **changes):
    """One row of a table, with `mse` relative to a reference estimator of error 1e-3."""
    settings = {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": 64}}
    measured = {"mse": mse, "bias_sq": mse / 2, "variance": mse / 2, "score_mse": mse / t**4, "mse_ratio": mse / 1e-3}
    return (
        dict.fromkeys(COLUMNS, "")
        | {"protocol": "1", "case": "digits", "data": "0123456789ab", "N": 1797, "d": 64, "name": name, "t": t}
        | {"settings": json.dumps(settings), "origin": "lit_knn", "cpu": "some CPU", "cores": 2, "memory_gb": 8}
        | {key: value for name, of in measured.items() for key, value in ((name, of), (f"{name}_se", of / 10))}
        | {"time_ratio": time, "time_ratio_low": 0.9 * time, "time_ratio_high": 1.2 * time}
        | {"reference_ms": 2, "ms": 2 * time}
        | {"repeats_itself": "yes", "seeded": "yes", "needs_source": "no"}
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
    return results


@pytest.mark.parametrize("seed", range(20))
def test_the_front_holds_the_points_that_no_other_beats(seed):
    draw = random.Random(seed)
    # Few values make many ties and equal points.
    points = [(draw.randint(0, 6), draw.choice([math.nan, *range(7)])) for _ in range(draw.randint(0, 30))]

    def beaten(point):
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    expected = [not math.isnan(point[1]) and not beaten(point) for point in points]
    assert pareto_front(points) == expected


def test_places_are_fronts_of_the_rest_and_incomplete_entries_come_last(tmp_path):
    rows = [row("slow", mse=1e-5, time=9), row("fast", mse=1e-2, time=0.1), row("beaten", mse=1e-2, time=0.2)]
    rows += [row("beaten twice", mse=1e-2, time=0.3), row("failed", mse=math.nan, time=0.01)]
    order = ranked(results_of(tmp_path, rows))
    assert [r.entry.name for r in order] == ["fast", "slow", "beaten", "beaten twice", "failed"]
    assert [r.place for r in order] == [1, 1, 2, 3, None]
    assert [r.front for r in order] == [{1.0}, {1.0}, set(), set(), set()]


def test_the_error_over_all_levels_is_the_worst_and_the_time_the_mean(tmp_path):
    rows = [row("a", t, mse, time) for t, mse, time in ((1.0, 1e-3, 1), (2.0, 9e-3, 2), (3.0, 2e-3, 6))]
    (entry,) = ranked(results_of(tmp_path, rows))
    assert (entry.error, entry.time) == (pytest.approx(9), 3)


def test_rounding_errors_count_as_equal_and_do_not_decide(tmp_path):
    # At t = 1 all are exact to rounding, the reference, too. At t = 2 the ratio is 0.1 for both.
    rows = [row(n, 1.0, mse, time, mse_ratio=mse / 1e-20) for n, mse, time in (("fast", 1e-18, 1), ("slow", 1e-30, 2))]
    rows += [row("fast", 2.0, 1e-4, 1), row("slow", 2.0, 1e-4, 2)]
    fast, slow = ranked(results_of(tmp_path, rows))
    assert (fast.entry.name, fast.place, slow.place) == ("fast", 1, 2)
    assert fast.error == slow.error == pytest.approx(0.1)
    assert fast.front == {1.0, 2.0}
    assert slow.front == set()


@pytest.mark.parametrize(
    ("value", "error", "ratio"),
    [
        (2.94e-7, "2.9e-7", "2.9e-7"),
        (0.0, "0", "0"),
        (0.474, "4.7e-1", "0.47"),
        (0.996, "1.0e0", "1.0"),
        (9.96, "1.0e1", "10"),
        (638.0, "6.4e2", "640"),
        (3.6e11, "3.6e11", "3.6e11"),
        (math.nan, "–", "–"),
    ],
)
def test_numbers_have_two_digits(value, error, ratio):
    assert (markdown.error(value), markdown.ratio(value)) == (error, ratio)


def test_a_mean_that_is_not_told_from_0_is_a_limit(tmp_path):
    # The bias is told from 0 by two standard errors, and may be negative; the MSE by one.
    rows = [
        row("negative", bias_sq=-1e-6, bias_sq_se=2e-6),
        row("unsure", bias_sq=3e-6, bias_sq_se=2e-6, mse=1e-6, mse_se=2e-6),
        row("sure", bias_sq=5e-6, bias_sq_se=2e-6, time=2),
        row("unknown error", mse_se="", bias_sq_se="", time=3),
    ]
    results = results_of(tmp_path, rows)
    entries = ranked(results)

    def cells(column):
        lines = content.means(results, entries, column).splitlines()[2:]
        return dict(line.strip("| ").split(" | ")[1:] for line in lines)

    assert cells("bias_sq") == {
        "negative": r"\< 4.0e-6",
        "unsure": r"\< 7.0e-6",
        "sure": "5.0e-6<br><sub>± 2.0e-6</sub>",
        "unknown error": "5.0e-5",
    }
    assert cells("mse")["unsure"] == r"\< 5.0e-6"
    assert cells("mse")["sure"] == "1.0e-4<br><sub>± 1.0e-5</sub>"


def test_files_merge_machines_are_told_apart_and_later_rows_win(tmp_path):
    first = table(
        tmp_path / "a.csv", [row(mse=1e-5), row(mse=2e-5, date="2026-03-01"), row(mse=3e-5, date="2026-02-01")]
    )
    second = table(tmp_path / "b.csv", [row(cpu="another CPU"), row(case="toy2d")])
    digits, toy2d = read_results([first, second])
    assert [r.case for r in (digits, toy2d)] == ["digits", "toy2d"]
    assert [entry.value(1.0, "mse") for entry in digits.entries] == [2e-5, 1e-4]
    assert digits.older == 2
    assert re.findall(r"machine \w", content.ranking(digits, ranked(digits))) == ["machine A", "machine B"]
    written = content.page([(digits, ranked(digits), "page")])
    assert "- **Machine B:** another CPU, 2 cores" in written
    assert "- **Left out:** 2 rows that were measured again later" in written
    assert "- **Measured:** 2026-01-02 to 2026-03-01" in written


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "99"}, "the protocol of its rows is '99'"),
        ({"mse": "little"}, "mse is 'little', which is no number"),
        ({"t": 0}, "t is '0', not a positive number"),
    ],
)
def test_bad_tables_are_refused_in_one_line(tmp_path, changes, words):
    path = table(tmp_path / "results.csv", [row() | changes])
    with pytest.raises(InputError, match=re.escape(words)) as refused:
        write_page([path], tmp_path / "page")
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "page.md").exists()


def test_the_page_holds_every_entry_escaped_and_is_complete(tmp_path):
    hostile = "<script>alert('*1*')</script> | $x$ `code`"
    rows = [row(name, t, mse, time) for t in (1.0, 5.0) for name, mse, time in (("KNN", 1e-3, 1), (hostile, 1e-4, 2))]
    for one in rows[1::2]:
        one |= {"origin": "adapter", "note": "a | b\n<b>c</b>", "settings": "{```}"}
        one |= {"certified_share": 0.9, "repeats_itself": "no"}
    written = write_page([table(tmp_path / "results.csv", rows)], tmp_path / "out" / "page")
    assert [path.name for path in written] == ["page.md", "page.png", "page_over_t.png"]
    assert all(path.stat().st_size for path in written)
    text = written[0].read_text()
    assert "<script>" not in text
    assert markdown.escaped(hostile) in text
    assert "![Error against time, digits](page.png)\n\n![Error ratio over t, digits](page_over_t.png)" in text
    for words in (
        f"to the reference estimator, KNN with k = {CASES['digits'].k} and n = {CASES['digits'].n}.",
        "### Certified errors",
        "does not give the same estimate",
        r"a \| b \<b\>c\</b\>",
        "lit-knn referee run --case digits",
    ):
        assert words in text
    # Settings that are no class path are shown as they are, within a longer fence.
    assert "````\n{```}\n````" in text
    # Rows of a table have the cells of their header.
    lines = [re.sub(r"\\.", "", line) for line in text.splitlines()]
    tables = "\n".join(line if line.startswith("| ") else "" for line in lines).split("\n\n")
    for part in filter(None, (part.strip() for part in tables)):
        assert len({line.count("|") for line in part.splitlines()}) == 1
    # A page made again is the same.
    kept = [path.read_bytes() for path in written]
    assert write_page([tmp_path / "results.csv"], tmp_path / "out" / "page") == written
    assert [path.read_bytes() for path in written] == kept


def test_pictures_have_a_panel_for_each_level_error_bars_and_the_front(tmp_path):
    rows = [
        row(n, t, mse, time) for t in (1.0, 5.0) for n, mse, time in (("a", 1e-2, 1), ("b", 1e-4, 2), ("c", 1e-3, 3))
    ]
    results = results_of(tmp_path, rows)
    figure = error_against_time(results, ranked(results))
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["all noise levels", "t = 1", "t = 5"]
    for axes in panels[1:]:
        bars = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
        assert len(bars) == 3
        (time,), (mse,) = bars[0].lines[0].get_data()
        (across,), (up,) = (lines.get_segments() for lines in bars[0].lines[2])
        assert across[:, 0] == pytest.approx([0.9 * time, 1.2 * time])
        assert up[:, 1] == pytest.approx([0.9 * mse, 1.1 * mse])
        (front,) = [line for line in axes.lines if line.get_label() == "Pareto front"]
        # The step falls from the top at the fastest, then at each entry on the front; "c" is beaten by "b".
        assert list(front.get_xdata())[:3] == [1, 1, 2]
        assert list(front.get_ydata())[1:] == [1e-2, 1e-4, 1e-4]
        assert {text.get_text() for text in axes.texts} == {"1", "2", "3"}
    assert len([axes for axes in ratio_over_t(results, ranked(results)).axes if axes.get_visible()]) == 3


def test_empty_columns_leave_pictures_and_pages_in_order(tmp_path):
    empty = dict.fromkeys(NUMBERS[1:], "")
    rows = [row("only one level", 1.0), row("known", 1.0, time=2), row("nothing", 5.0) | empty]
    rows += [row("known", 5.0, time=2, time_ratio_low="", mse_se="")]
    results = results_of(tmp_path, rows)
    entries = ranked(results)
    for figure in (error_against_time(results, entries), ratio_over_t(results, entries)):
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert all(map(math.isfinite, (*axes.get_xlim(), *axes.get_ylim())))
    assert "nan" not in content.page([(results, entries, "page")])
