"""Figure 5's samples: their draws and levels, the sweep over t_switch, and what a finished point depends on."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lit_knn.callbacks import HybridSampling
from lit_knn.common.tables import read_rows
from lit_knn.estimators import KNN, Exact, Wiener
from lit_knn.figures import image_grid
from lit_knn.index import FaissIndex
from lit_knn.metrics import Pixels, kept_results
from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.modules import LitEstimator
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import seeded_noise
from tests.commands.test_best_checkpoint import Renamed
from tests.short_training import TRAINER
from tests.trained_runs import events_of
from tests.watched import Asked, Images, OneOfSeveral, heun_levels, karras

GRID = {"sigma_min": 0.03, "sigma_max": 12.0, "rho": 4.0}
DATA = ReferenceSet(torch.arange(200.0).reshape(200, 1))


def drawn(estimator=None, t=3.0, first=0, number=4, seed=0):
    """The network below t of one batch of samples."""
    drawing = HybridSamples(Asked(), DATA, 5, NoiseGrid(**GRID), seed)
    drawing.draw(estimator, t, torch.arange(first, first + number))
    return drawing.network


def starts(first=0, seed=0):
    """The images that forward samples start from, without their noise."""
    return drawn(None, 0.5, first, 60, seed).points[0] - 0.5 * seeded_noise(
        range(first, first + 60), (1,)
    )


def test_forward_samples_start_from_noisy_images_of_whole_set():
    for x in (starts(), starts(first=60)):
        torch.testing.assert_close(x, x.round(), rtol=0, atol=1e-3)
        assert -0.5 < x.min() < 20
        assert 180 < x.max() < 199.5


@pytest.mark.parametrize("t_switch", [0.5, 3.0])
def test_both_samplers_follow_the_grid_cut_at_t_switch(t_switch):
    grid, cut, above = karras(5, **GRID), torch.tensor([t_switch]), Asked()
    for estimator in (above, None):
        below = torch.cat([cut, grid[grid < t_switch]])
        assert drawn(estimator, t_switch).levels == pytest.approx(heun_levels(below), rel=1e-6)
    assert above.levels == pytest.approx(
        heun_levels(torch.cat([grid[grid > t_switch], cut]))[:-1], rel=1e-6
    )
    torch.testing.assert_close(above.points[0], 12 * seeded_noise(range(4), (1,)))


def test_draws_repeat_but_differ_by_batch_seed_and_side():
    def draws(first=0, seed=0):
        torch.manual_seed(len(seen))
        seen.append(Asked())
        below = drawn(seen[-1], 3.0, first, seed=seed)
        assert not any(torch.equal(a, b) for a in below.drawn for b in seen[-1].drawn)
        return torch.stack(seen[-1].drawn), torch.stack(below.drawn), starts(first, seed).round()

    seen = []
    one = draws()
    assert not torch.equal(one[0][0], one[0][1])
    for other in (draws(first=4), draws(seed=1)):
        # Of 60 starts among 200 images, few are equal by chance.
        assert all((a == b).double().mean() < 0.1 for a, b in zip(one, other, strict=True))
    assert all(map(torch.equal, one, draws()))
    assert torch.equal(one[1], torch.stack(drawn(None).drawn))


# The sweep from the command line

SWEEP = {
    "estimators": {
        "KNN": {"class_path": "KNN", "init_args": {"k": 32, "n": 8}},
        "STF": {"class_path": "STF", "init_args": {"n": 8}},
    },
    "t_switch": [1.0, 10.0],
    "folder": "results",
    "num_samples": 40,
    "num_steps": 3,
    "batch_size": 20,
    "extractor": {"class_path": "lit_knn.metrics.Pixels"},
    "cache_dir": None,
}
RESULTS = "hybrid_sampling_fd_pixels.csv"


def values(path):
    measured = ("fd_pixels", "copied_fraction", "mean_nearest_distance")
    return {
        (row["method"], row["t_switch"]): [float(row[name]) for name in measured]
        for row in read_rows(path)
    }


def test_sweep_shows_every_point_and_resumes_after_interruption(validate, network, monkeypatch):
    asked, original = [], HybridSamples.draw

    def watched(self, estimator, t_switch, seeds):
        if len(asked) == 17:  # in the middle of the third point of the second sweep
            asked.append(None)
            raise KeyboardInterrupt
        asked.append(seeds)
        return original(self, estimator, t_switch, seeds)

    monkeypatch.setattr(HybridSamples, "draw", watched)
    options = {**SWEEP, "network": network("network.ckpt")}
    run = validate({"HybridSampling": {**options, "folder": "whole"}})
    assert len(asked) == 6 * 2
    rows = read_rows(Path("whole", RESULTS))
    points = [(row["method"], float(row["t_switch"])) for row in rows]
    assert points == [(method, t) for t in (10.0, 1.0) for method in ("KNN", "STF", "forward")]
    for row in rows:
        assert Path("whole", "settings", f"{row['settings']}.json").exists()
        grid = Path(
            "whole", "samples", f"{row['method']}_t{float(row['t_switch']):g}_{row['settings']}.png"
        )
        assert Image.open(grid).size[0] > 4 * 32
    assert np.asarray(Image.open(run / "hybrid_sampling.png").convert("L")).std() > 5
    assert (run / "hybrid_sampling.pdf").read_bytes().startswith(b"%PDF")
    assert {"hybrid_sampling", "samples/KNN/t_switch=1"} <= set(events_of(run)[0].Tags()["images"])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        validate({"HybridSampling": options})
    assert [method for method, _ in values(Path("results", RESULTS))] == ["KNN", "STF"]
    for number in (4 * 2, 0):
        asked.clear()
        run = validate({"HybridSampling": options})
        assert len(asked) == number
        assert values(Path("results", RESULTS)) == values(Path("whole", RESULTS))
        assert (run / "hybrid_sampling.png").exists()


@pytest.mark.usefixtures("blank_figures")
def test_exact_flow_near_zero_copies_whatever_the_network(validate, network):
    options = {"network": network("network.ckpt"), "estimators": {"Exact": {"class_path": "Exact"}}}
    options |= {"t_switch": [0.003], "num_steps": 18, "held_out": True}
    validate({"HybridSampling": {**SWEEP, **options}}, "--data.held_out", "100")
    exact, forward = read_rows(Path("results", "hybrid_sampling_fd_pixels_held_out.csv"))
    assert float(exact["copied_fraction"]) > 0.9
    assert float(forward["copied_fraction"]) == 1
    distance = float(forward["mean_nearest_distance"])
    assert distance == pytest.approx(0.003 * 8, rel=0.2)  # 0.003·ε in 64 dimensions
    # The held-out images have no copies, so they are farther.
    assert float(forward["fd_pixels_held_out"]) > 64 * distance**2


# A finished point depends on these settings


def sweep(folder, model=None, data=None, rank=0, **options):
    """Run a small sweep and return its table."""
    settings = {
        "estimators": {"a": KNN(k=8, n=4)},
        "num_samples": 5,
        "num_steps": 3,
        "batch_size": 3,
    }
    settings |= {"cache_dir": None, "network": Exact(), **options}
    callback = HybridSampling(
        t_switch=[2.0], folder=str(folder), **{"extractor": Pixels(), **settings}
    )
    run = {
        **TRAINER,
        "limit_val_batches": 1,
        "enable_checkpointing": False,
        "strategy": OneOfSeveral(rank, 2),
    }
    trainer = pl.Trainer(
        **{**run, "logger": pl.loggers.CSVLogger(folder / "log")}, callbacks=[callback]
    )
    trainer.validate(LitEstimator(**(model or {})), data or Images(), verbose=False)
    table = folder / RESULTS
    return read_rows(table) if table.exists() else []


@pytest.mark.usefixtures("blank_figures")
def test_a_point_is_of_its_data_grid_seed_estimators_and_options(tmp_path):
    # There are two methods, and the baseline has no estimator.
    assert len(sweep(tmp_path)) == 2
    others = Images()  # with one number changed
    others.x[59, 0, 3, 3] += 1
    others.reference = ReferenceSet(others.x)
    indexed = Images()
    indexed.reference = ReferenceSet(indexed.x, FaissIndex("SQ8"))
    changes = [
        {"threshold": 0.5},
        {"batch_size": 2},
        {"num_samples": 4},
        {"num_steps": 4},
        {"data": others},
    ]
    changes += [{"data": indexed}, {"extractor": Renamed()}]
    changes += [{"model": {"rho": 5.0, "seed": 1}}, {"model": {"rho": 5.0}}]
    for number, change in enumerate(changes, start=1):
        assert len(sweep(tmp_path, **change)) == 2 + 2 * number, change
    assert len(sweep(tmp_path, estimators={"a": KNN(k=9, n=4)})) == 3 + 2 * len(changes)
    # A linear filter of four components makes no copies, but all ratios of distances are below 1.
    other = sweep(tmp_path, network=Wiener(r=4), threshold=1.0, cache_dir=str(tmp_path / "cache"))[
        -2:
    ]
    assert [row["copied_fraction"] for row in other] == ["1.0"] * 2
    assert len(sweep(tmp_path, network=Exact(), threshold=1.0)) == 7 + 2 * len(changes)
    assert len(list((tmp_path / "cache").glob("fd_pixels-*.npz"))) == 1


def test_sweep_grid_is_of_first_batch_and_rank_0_writes_table(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kept_results, "on_first_rank", lambda work: [])
        assert sweep(tmp_path / "second", rank=1) == []
    sweep(tmp_path / "first")
    (path,) = (tmp_path / "first" / "samples").glob("forward_t2_*.png")
    drawing = HybridSamples(
        Exact().bind(Images().reference), Images().reference, 3, LitEstimator().grid, 0
    )
    expected = image_grid(drawing.draw(None, 2.0, torch.arange(3)))
    picture = np.asarray(Image.open(path)).transpose(2, 0, 1)
    assert picture.shape == expected.shape
    assert np.abs(picture - expected.numpy() * 255).max() <= 1
