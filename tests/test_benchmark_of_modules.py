"""The benchmark of the training modules, at the smallest size."""

import csv

import pytest

from benchmarks import modules

SIZE = {"device": "cpu", "threads": 1, "side": 8, "images": 40, "channels": 16, "batch": 4, "warm_up": 1, "steps": 1}


@pytest.mark.parametrize("module", modules.MODULES)
def test_each_module_is_measured(module):
    values = modules.train(module, "OneSample", modules.Setting(**SIZE))
    assert values["seconds"] > 0
    assert 0 <= values["estimator_share"] < 1


def test_rows_have_ratios_to_ict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(modules, "MODULES", {name: modules.MODULES[name] for name in ("iCT", "EDM")})
    size = [text for name, value in SIZE.items() for text in (f"--{name}", str(value))]
    modules.main(["--estimators", "OneSample", "--rounds", "1", "--output", str(tmp_path / "modules"), *size])
    assert "| OneSample | EDM |" in capsys.readouterr().out
    with (tmp_path / "modules.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["module"], float(first["seconds_ratio"]), float(first["bytes_ratio"])) == ("iCT", 1, 1)
    for quantity in ("seconds", "bytes"):
        ratio = float(second[quantity]) / float(first[quantity])
        assert float(second[f"{quantity}_ratio"]) == pytest.approx(ratio)
