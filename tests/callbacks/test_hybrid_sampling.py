"""The sweep of Figure 5 and the memorisation callback, from the command line."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_knn.common.tables import ResultsTable
from lit_knn.metrics.hybrid import HybridSamples
from main import main
from tests import ROOT
from tests.networks import write_own, write_published

RUN = str(ROOT / "configs" / "figure5" / "digits.yaml")
RESULTS = Path("results/hybrid_sampling_fd_pixels.csv")
SMALL = {"folder": "results", "num_samples": 40, "num_steps": 3, "batch_size": 20, "t_switch": [1.0, 10.0]}
SMALL |= {"extractor": {"class_path": "lit_knn.metrics.Pixels"}, "cache_dir": None}
NET = {"class_path": "lit_knn.nets.UNet"}
NET["init_args"] = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1, "augment_dim": 9}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own_with_a_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_own("network.ckpt", augment_dim=9)


def arguments(estimators=("KNN", "STF"), network="network.ckpt", net=NET, trainer=None, **options):
    """Arguments for a small run on the digits, with the given options of the callback."""
    parts = {
        "KNN": {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": 32, "n": 8}},
        "STF": {"class_path": "lit_knn.estimators.STF", "init_args": {"n": 8}},
        "Exact": {"class_path": "lit_knn.estimators.Exact"},
        "OneSample": {"class_path": "lit_knn.estimators.OneSample"},
        "forward": {"class_path": "lit_knn.estimators.Exact"},
        "Bogus": {"class_path": "lit_knn.estimators.Bogus"},
        "KNN9": {"class_path": "lit_knn.estimators.KNN", "init_args": {"k": 9999, "n": 8}},
    }
    callback = {
        "class_path": "lit_knn.callbacks.HybridSampling",
        "init_args": {
            "network": {"class_path": "lit_knn.estimators.Network", "init_args": {"path": network, "net": net}},
            "estimators": {name: parts[name] for name in estimators},
            **SMALL,
            **options,
        },
    }
    settings = {"enable_progress_bar": False, "callbacks": [callback], **(trainer or {})}
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": settings}))
    return ["validate", "-c", RUN, "-c", "small.yaml"]


def rows(path=RESULTS):
    with path.open() as file:
        return list(csv.DictReader(file))


def values(row):
    return [float(row[name]) for name in ("fd_pixels", "copied_fraction", "mean_nearest_distance")]


@pytest.fixture
def drawn(monkeypatch):
    """A list of the drawn batches: (class of the estimator, t_switch, first seed)."""
    seen, original = [], HybridSamples.draw

    def watched(self, estimator, t_switch, seeds):
        seen.append((type(estimator).__name__, t_switch, int(seeds[0])))
        return original(self, estimator, t_switch, seeds)

    monkeypatch.setattr(HybridSamples, "draw", watched)
    return seen


def test_every_point_has_a_row_a_grid_and_its_place_in_the_picture(drawn):
    main(arguments())
    table = rows()
    points = {(row["method"], float(row["t_switch"])) for row in table}
    assert points == {(method, t) for method in ("KNN", "STF", "forward") for t in (1.0, 10.0)}
    assert len(table) == 6
    assert len(drawn) == 6 * 2
    for row in table:
        assert 0 <= float(row["copied_fraction"]) <= 1
        assert float(row["mean_nearest_distance"]) > 0
        assert (RESULTS.parent / "settings" / f"{row['settings']}.json").exists()
        grid = RESULTS.parent / "samples" / f"{row['method']}_t{float(row['t_switch']):g}_{row['settings']}.png"
        assert Image.open(grid).size[0] > 4 * 32
    folder = Path("runs/figure5_digits/estimator_0")
    assert np.asarray(Image.open(folder / "hybrid_sampling.png").convert("L")).std() > 5
    assert (folder / "hybrid_sampling.pdf").read_bytes().startswith(b"%PDF")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"hybrid_sampling", "samples/KNN/t_switch=1"} <= set(events.Tags()["images"])


@pytest.mark.usefixtures("blank_figures")
def test_an_interrupted_sweep_goes_on_where_it_was(drawn, monkeypatch):
    main(arguments(folder="whole"))
    whole = {(row["method"], row["t_switch"]): values(row) for row in rows(Path("whole") / RESULTS.name)}
    drawn.clear()
    watched = HybridSamples.draw

    def interrupted(self, estimator, t_switch, seeds):
        if len(drawn) == 5:  # in the middle of the third point
            raise KeyboardInterrupt
        return watched(self, estimator, t_switch, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(HybridSamples, "draw", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            main(arguments())
    assert [row["method"] for row in rows()] == ["KNN", "STF"]
    drawn.clear()
    main(arguments())
    assert len(drawn) == 4 * 2
    assert {(row["method"], row["t_switch"]): values(row) for row in rows()} == whole
    drawn.clear()
    main(arguments())
    assert drawn == []
    assert Path("runs/figure5_digits/estimator_3/hybrid_sampling.png").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("t_switch", "fid"),
        lambda text: text.replace("0.3", "one"),
    ],
    ids=["half", "other columns", "no number"],
)
def test_a_table_that_holds_something_else_is_kept_aside(damage):
    table = ResultsTable("results/table.csv", {"method": str, "t_switch": float}, key=("method",))
    row = {"method": "STF", "t_switch": 0.1 + 0.2}
    table.append(row)
    assert table.load() == [row]
    text = damage(table.path.read_text())
    table.path.write_text(text)
    with pytest.warns(UserWarning, match=r"table.csv is damaged .* kept as results/table.damaged-1.csv"):
        assert table.load() == []
    assert table.path.with_name("table.damaged-1.csv").read_text() == text


@pytest.mark.usefixtures("blank_figures")
def test_near_zero_every_sample_of_the_exact_flow_is_a_copy_whatever_the_network():
    main(arguments(["Exact"], t_switch=[0.003], num_steps=18))
    exact, forward = rows()
    assert float(exact["copied_fraction"]) > 0.9
    assert float(forward["copied_fraction"]) == 1
    assert float(forward["mean_nearest_distance"]) == pytest.approx(0.003 * 8, rel=0.2)  # 0.003·ε in 64 dimensions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"t_switch": [1.0, 0.002]}, ["t_switch=0.002", "sigma_min=0.002"]),
        ({"estimators": ["forward"]}, ["'forward'", "baseline"]),
        ({"estimators": ["OneSample"]}, ["estimators.OneSample", "x_source"]),
        ({"estimators": ["KNN9"]}, ["k=9999", "1797"]),
        ({"threshold": 2.0}, ["threshold", "2.0"]),
        ({"network": "published.pkl", "net": None}, ["network", "(1, 8, 8)", "in_channels=3"]),
        ({"net": {**NET, "init_args": {**NET["init_args"], "channels": 16}}}, ["do not fit the architecture"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_ends_in_one_line_before_sampling(options, words, drawn, capsys):
    write_published("published.pkl")
    with pytest.raises(SystemExit):
        main(arguments(**options))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in line
    assert drawn == []
    assert not RESULTS.exists()


MEMORISATION = {"class_path": "lit_knn.callbacks.Memorisation"}
MEMORISATION["init_args"] = {"num_samples": 60, "batch_size": 15, "num_pairs": 12}


def test_memorisation_finds_the_copies_of_the_exact_flow_and_shows_them_beside_their_sources():
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [MEMORISATION]}}))
    args = ["--model.estimator", "Exact", "--model.sampling_steps", "40", "--trainer.enable_progress_bar", "false"]
    main(["validate", "-c", RUN, "-c", "small.yaml", *args])
    folder = Path("runs/figure5_digits/exact_0")
    events = EventAccumulator(str(folder))
    events.Reload()
    (copied,) = events.Scalars("samples/copied_fraction")
    assert copied.value > 0.9
    assert "samples/memorisation" in events.Tags()["images"]
    picture = np.asarray(Image.open(folder / "memorisation" / "step_0000000.png").convert("L")).astype(int)
    # Two double rows show 8 and 4 pairs; in each, the upper half equals the lower half.
    for pair in np.split(picture, 2):
        upper, lower = pair[2:34], pair[36:68]
        assert np.abs(upper - lower).max() <= 2
        assert upper.std() > 30
