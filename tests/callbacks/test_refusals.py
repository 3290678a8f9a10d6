"""Callbacks refuse what does not fit in one line, before any sampling and before any file of results."""

from pathlib import Path

import pytest

from lit_knn.metrics.hybrid import HybridSamples
from lit_knn.modules import LitEstimator
from tests.command_lines import DEMO, refusal_of
from tests.networks import write_published


def made(name, **options):
    return {"class_path": name, "init_args": options}


KNN, EXACT, PATCH = made("KNN", k=32, n=8), made("Exact"), made("PatchPosterior", size=3)
PIXELS, INCEPTION, LITE = (
    made(f"lit_knn.metrics.{name}") for name in ("Pixels", "InceptionV3", "EfficientNetLite0")
)
CURVE = {"estimators": {"KNN": KNN}, "noise_levels": [0.5, 5.0], "num_z": 20, "repeats": 3}
FEW = {"num_samples": 30, "extractor": PIXELS, "cache_dir": None}
SWEEP = {
    **FEW,
    "estimators": {"KNN": KNN},
    "network": EXACT,
    "t_switch": [1.0],
    "folder": "results",
}
MEANS = {"estimators": {"a": EXACT}, "noise_levels": [1.0]}
LINE = ("--data", "PointsOnALine")

CASES = [
    (
        "EstimatorError",
        CURVE | {"noise_levels": [1.0, 0.0]},
        (),
        "noise_levels must be finite and above 0, got 0.0",
    ),
    ("EstimatorError", CURVE | {"num_z": 1798}, (), "num_z=1798 is more than the 1797 images"),
    (
        "EstimatorError",
        CURVE | {"repeats": 1},
        (),
        "repeats must be at least 2 to tell the variance of KNN, got 1",
    ),
    ("Fidelity", FEW | {"extra_metrics": ["kid", "fidd"]}, (), "unknown metric 'fidd'"),
    (
        "Fidelity",
        FEW | {"extra_metrics": ["kid"]},
        (),
        "kid_subset_size=1000: at least 1000 images are needed, there are 30",
    ),
    ("Fidelity", FEW | {"batch_size": 0}, (), "batch_size must be at least 1, got 0"),
    ("Fidelity", FEW | {"kid_subset_size": 1}, (), "kid_subset_size must be at least 2, got 1"),
    (
        "Fidelity",
        FEW | {"extractor": INCEPTION | {"init_args": {"weights": "no"}}},
        (),
        "No such file or directory: 'no'",
    ),
    (
        "Fidelity",
        FEW | {"extractor": LITE},
        LINE,
        "EfficientNetLite0: needs images of 1 or 3 channels",
    ),
    (
        "PixelFrechetDistance",
        {"held_out": True},
        (),
        "held_out=true: the data holds no images out: set data.held_out",
    ),
    ("HybridSampling", SWEEP | {"t_switch": [1.0, 0.002]}, (), "t_switch=0.002"),
    (
        "HybridSampling",
        SWEEP | {"estimators": {"one": made("OneSample")}},
        (),
        "estimators.one cannot be used",
    ),
    ("HybridSampling", SWEEP | {"estimators": {"a/b": EXACT}}, (), "got 'a/b'"),
    ("HybridSampling", SWEEP | {"estimators": {1: EXACT}}, (), "got 1"),
    ("HybridSampling", SWEEP | {"estimators": {"far": made("KNN", k=9999, n=8)}}, (), "k=9999"),
    (
        "HybridSampling",
        SWEEP | {"network": made("Network", path="rgb.pkl")},
        (),
        "network cannot be used on images",
    ),
    (
        "HybridSampling",
        SWEEP | {"network": made("Network", path="no.pkl")},
        (),
        "path=no.pkl: no such file",
    ),
    (
        "HybridSampling",
        SWEEP | {"network": made("Switched", below=PATCH, above=EXACT, t=100.0)},
        (),
        "t=100",
    ),
    ("PosteriorPicture", {"k": 41}, LINE, "k=41 is more than the 40 images"),
    ("MeanPicture", MEANS, LINE, "must be images of 1 or 3 channels, not (1,)"),
    (
        "MeanPicture",
        MEANS | {"estimators": {1: EXACT}},
        (),
        "estimators: the name 1 is no text; put it in quotes",
    ),
]


@pytest.mark.parametrize(("callback", "options", "args", "words"), CASES)
def test_what_does_not_fit_is_refused(callback, options, args, words, command, capsys, monkeypatch):
    monkeypatch.setattr(LitEstimator, "sample", None)
    monkeypatch.setattr(HybridSamples, "draw", None)
    write_published("rgb.pkl")
    assert words in refusal_of(command({callback: options}, *args), capsys)
    assert not list(Path().rglob("*.csv"))


def test_two_tables_of_one_name_are_refused(command, capsys):
    both = command({"EstimatorError": CURVE, "estimator_error.EstimatorError": CURVE})
    assert (
        "EstimatorError: another callback of this run also writes estimator_error.csv"
        in refusal_of(both, capsys)
    )


def test_fit_is_refused(command, capsys):
    command({"MeanPicture": MEANS})
    line = refusal_of(["fit", "-c", DEMO, "-c", "callbacks.yaml"], capsys)
    assert "MeanPicture is for validate, not for fit" in line
