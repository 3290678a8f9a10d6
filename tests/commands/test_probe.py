import csv

import numpy as np
import pytest
import yaml

from lit_knn.metrics.probe import Probe
from main import main, make_cli
from tests import ROOT
from tests.command_lines import refusal_of

SMALL = ["--trainer.accelerator", "cpu", "--levels", "5", "--latents", "16", "--t_min", "0.1", "--t_max", "10"]
DIGITS = str(ROOT / "configs" / "table2" / "digits.yaml")


def test_a_probe_goes_on_and_its_settings_are_taken_by_a_fit(tmp_path, monkeypatch, capsys):
    out = ["--out", str(tmp_path / "probe")]
    measure, measured = Probe.level, []

    def two_levels(self, number, t):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(t)
        return measure(self, number, t)

    monkeypatch.setattr(Probe, "level", two_levels)
    with pytest.raises(SystemExit):
        main(["probe", "--data", "Digits", *SMALL, *out])
    monkeypatch.setattr(Probe, "level", lambda self, number, t: measured.append(t) or measure(self, number, t))
    main(["probe", "--data", "Digits", *SMALL, *out])
    assert measured == pytest.approx([0.1, 0.1 * 10**0.5, 1.0, 10**0.5, 10.0])  # Each level once.
    told = capsys.readouterr().out
    assert "Of the target noise of EDM on this data, SubspaceKNN removes" in told

    # With the levels of a run, the kept measurement serves, too.
    main(["probe", "-c", DIGITS, *SMALL, *out])
    assert len(measured) == 5
    told = capsys.readouterr().out
    assert "Of the target noise of LitEDM on this data" in told
    assert "of a forward and backward pass" in told
    rows = list(csv.DictReader((tmp_path / "probe" / "probe.csv").open()))
    assert [float(row["t"]) for row in rows] == pytest.approx(measured)
    assert (tmp_path / "probe" / "probe.png").stat().st_size > 10_000
    settings = yaml.safe_load((tmp_path / "probe" / "probe.yaml").read_text())["model"]["init_args"]
    from sklearn.datasets import load_digits

    # 180 of the 1,797 digits are held out, so the two standard deviations are of slightly different sets.
    assert settings["sigma_data"] == pytest.approx(np.std(load_digits().images / 8 - 1), rel=0.01)
    cli = make_cli(
        ["-c", DIGITS, "-c", str(tmp_path / "probe" / "probe.yaml"), "--trainer.accelerator", "cpu"], run=False
    )
    assert cli.model.hparams.sigma_data == settings["sigma_data"]
    assert cli.model.hparams.sigma_max == settings["sigma_max"] < 20


def test_a_level_is_kept_for_equal_labels_and_settings_alone(tmp_path, monkeypatch, capsys):
    measure, measured = Probe.level, []
    monkeypatch.setattr(Probe, "level", lambda self, number, t: measured.append(t) or measure(self, number, t))
    images = np.random.default_rng(0).integers(0, 255, (80, 1, 4, 4), dtype=np.uint8)
    path, out = tmp_path / "x.npz", ["--out", str(tmp_path / "probe")]

    def probed(classes, *options):
        np.savez(path, images=images, labels=np.arange(80) % classes)
        before = len(measured)
        main(["probe", "--data", "Arrays", "--data.path", str(path), *SMALL, *out, *options])
        return len(measured) - before

    assert [probed(2), probed(2), probed(4)] == [5, 0, 0]
    assert [probed(2, "--by_class", "true"), probed(4, "--by_class", "true")] == [5, 5]
    assert probed(2, "--data.index", "TorchIndex") == 5
    assert probed(2, "--data.train_images", "40") == 5


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--held_out", "1.0"], "held_out is a share of the images, at least 0 and below 1, got 1.0"),
        (["--levels", "1"], "noise_levels=1, a number of levels, must be at least 2"),
        (["--latents", "1"], "latents must be at least 2, got 1"),
    ],
)
def test_bad_options_are_refused(options, rule, tmp_path, capsys):
    out = tmp_path / "probe"
    assert rule in refusal_of(["probe", "--data", "Digits", *SMALL, *options, "--out", str(out)], capsys)
    assert not out.exists()
