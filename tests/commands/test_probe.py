import csv
import re

import numpy as np
import pytest
import torch
import yaml

from lit_knn.commands.probe import conclude, constants, training_of
from lit_knn.commands.trainer import Trainer
from lit_knn.estimators import OneSample
from lit_knn.figures import probe_figure
from lit_knn.metrics import probe
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.modules import LitEDM, LitEstimator, LitFlow, LitICT
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.solvers import euler_step
from main import main, make_cli
from tests import ROOT
from tests.command_lines import refusal_of
from tests.toys import low_rank_vectors

DIGITS, CONDITIONAL = (
    str(ROOT / "configs" / name) for name in ("table2/digits.yaml", "table1/digits_conditional.yaml")
)
CPU = ["--trainer.accelerator", "cpu"]


@pytest.mark.usefixtures("blank_figures")
def test_a_probe_goes_on_and_its_settings_are_taken_by_a_fit(tmp_path, monkeypatch, capsys):
    measured, stop, measure_level = [], [True], probe.measure_level

    def measure(latents, by_class, bound, number, t):
        if "STF" in bound:
            if len(measured) == 2 and stop:
                raise KeyboardInterrupt(stop.pop())
            measured.append((t, by_class))
        return measure_level(latents, by_class, bound, number, t)

    def run(*options):
        main(["probe", *options, *CPU, "--levels", "3", "--latents", "16", "--t_min", "0.1", "--out", str(tmp_path)])
        settings = yaml.safe_load((tmp_path / "probe.yaml").read_text())["model"]["init_args"]
        return capsys.readouterr().out, list(csv.DictReader((tmp_path / "probe.csv").open())), settings

    monkeypatch.setattr(probe, "measure_level", measure)
    with pytest.raises(SystemExit):
        run("--data", "Digits")
    assert "of the target noise of EDM; it costs" in run("--data", "Digits")[0]
    assert [t for t, _ in measured] == pytest.approx([0.1, 8**0.5, 80.0])  # Each level once.

    # With the levels of a run the kept measurement serves, too. The default share that is held out is 180 of 1,797.
    text, rows, settings = run("-c", DIGITS, "--held_out", "0.5", "--data.held_out", "180")
    assert len(measured) == 3
    assert re.search(r"KNN removes 9\d\.\d\d% ± 0\.\d\d% .* LitEDM; .* of a pass of the net", text)
    assert (rows[0]["KNN"], rows[0]["collapsed"], rows[0]["latents"]) == ("", "1.0", "16")
    assert float(rows[1]["STF"]) > float(rows[1]["STF_se"]) > 0
    assert float(rows[1]["held_out"]) == pytest.approx(float(rows[1]["wiener_held_out"]), rel=0.1)
    cli = make_cli(["-c", DIGITS, "-c", str(tmp_path / "probe.yaml"), *CPU], run=False)
    assert cli.model.hparams.sigma_data == settings["sigma_data"] == pytest.approx(0.75, rel=0.01)
    assert cli.model.hparams.sigma_max == settings["sigma_max"] < 20

    # A class-conditional model is probed by class. A consistency model samples from its highest level.
    text, rows, settings = run("-c", CONDITIONAL, "--held_out", "0", "--model.sampling_sigmas", "[80, 20, 0.8]")
    assert [by_class for _, by_class in measured] == [False] * 3 + [True] * 3
    assert "held_out" not in rows[0]
    assert settings["sampling_sigmas"] == [settings["sigma_max"], 0.8]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--held_out", "1.0"], "data.held_out=1797 needs at least 1798 images"),
        (["--latents", "1"], "latents must be at least 2, got 1"),
    ],
)
def test_bad_options_are_refused(options, rule, tmp_path, capsys):
    out = tmp_path / "probe"
    assert rule in refusal_of(["probe", "--data", "Digits", *CPU, *options, "--out", str(out)], capsys)
    assert not out.exists()


def test_the_weight_of_a_training_is_that_of_its_loss():
    def of(model):
        model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        return training_of(model, (1, 4, 4), 0)[1:3]

    net = UNet(1, 8)
    sigma, weight = of(LitEDM(net, OneSample(), P_mean=-0.5, sigma_data=0.7))
    assert weight * (sigma * 0.7) ** 2 == pytest.approx(sigma**2 + 0.7**2)
    assert np.log(sigma).mean() == pytest.approx(-0.5, abs=5 * 1.2 / len(sigma) ** 0.5)
    sigma, weight = of(LitFlow(net, OneSample()))
    assert weight * (sigma / (1 + sigma)) ** 2 == pytest.approx(np.ones(len(sigma)))  # The velocity is (z − μ)/τ.

    # In consistency training the weight is how far an error moves ẑ.
    model = LitICT(net, OneSample())
    sigma, weight = of(model)
    t, r = model.draw_levels(len(sigma), torch.Generator().manual_seed(1))
    z, mu = torch.zeros(len(t), 1, dtype=torch.float64), torch.ones(len(t), 1, dtype=torch.float64)
    moved = euler_step(z, t, r, lambda z, t: mu) - euler_step(z, t, r, lambda z, t: 0 * mu)
    expected = (moved.flatten().square() / (t - r)).numpy()
    # Other draws of the same 1,280 levels.
    assert [weight.mean(), weight.max()] == pytest.approx([expected.mean(), expected.max()], rel=0.05)


def test_what_is_said_follows_from_the_curves():
    t = 2.0 ** np.arange(-6, 7)
    # The noise is 1 from t = 1/8 and 1.02 from t = 32 on. STF leaves 0.04/t of it, and KNN a fifth on average.
    one = 1.0 * (t > 1 / 9) + 0.02 * (t > 31)
    curves = {"irreducible": one, "STF": one * np.minimum(1, 0.04 / t), "KNN": one / 5, "SubspaceKNN": one / 5}
    curves |= {"collapsed": t < 1 / 9, "collapsed_tenth": t < 1 / 5, "variance": 1.02 + 0 * t}
    curves |= dict.fromkeys(("STF_ms", "KNN_ms", "SubspaceKNN_ms"), 1 + 2 * (one > 0))
    table = {name: torch.tensor(values * np.ones((8, 1))).T.double() for name, values in curves.items()}
    table["KNN"] *= torch.tensor([0.0, 2.0] * 4)
    # The weight of t = 16 is 2, so half of the noise is there, and half at t = 1.
    sigma = np.repeat([1.0, 16.0, 1 / 64, 1 / 100], [500, 250, 225, 25])
    text = " ".join(conclude(t, table, ("a run", sigma, np.where(sigma > 10, 2.0, 1.0), 6.0)))
    assert f"STF removes {1 - (0.04 + 0.04 / 16) / 2:.2%} ± 0.00%" in text
    # Half of the latents have 0 and half 2/5 of the noise: 0.2·sqrt(8/7)/sqrt(8). Three quarters of the levels cost 3.
    assert (
        f"KNN removes 80.00% ± {0.2 / 7**0.5:.2%} of the target noise of a run; it costs 2.5 ms an image, 42%" in text
    )
    # Between 1/16 and 1/8 the collapse falls from 1 to 0. Between 16 and 32 the rest of the variance falls from 0.0196.
    assert f"up to level {2**-3.99:.3g} at" in text
    assert f"tenth of the images that level is {2**-2.99:.3g}. 75.0% of the noise levels are above" in text
    assert "up to level 4; above it" in text
    assert "50.0% of the target noise is between these levels. Above level 22.5 " in text
    assert "2.5% of the noise levels are outside" in text
    assert "Nothing to gain" not in text

    table |= {"STF": table["irreducible"], "collapsed_tenth": 0 * table["collapsed_tenth"]}
    text = " ".join(conclude(t, table, ("a run", np.repeat([1 / 60, 1], [995, 5]), np.ones(1000), 6.0)))
    assert text.startswith("Nothing to gain")
    assert "that level is <0.0156. 0.5% of" in text
    assert "up to level >64; above it" in text


def test_constants_are_those_of_all_pairs_and_values():
    images = low_rank_vectors(50)
    pairs = torch.cdist(images.double(), images.double())
    largest, nearest = pairs.max().item(), pairs.fill_diagonal_(torch.inf).amin(1).median().item()
    values, lines = constants(NoisyLatents(ReferenceSet(images), 50, 0), LitEstimator())
    sigma_data = images.double().std(correction=0).item()
    expected = {"sigma_data": sigma_data, "sigma_min": 0.004 * sigma_data, "sigma_max": largest}
    assert values == pytest.approx(expected, rel=1e-3)  # Four digits.
    assert f"the nearest image is {nearest:.3g} away (median)" in lines[2]
    assert ["does not fit" in line for line in lines] == [False, True, True, True]


def test_the_picture_shows_the_rows():
    names = ["irreducible", "images", "STF", "KNN", "SubspaceKNN", "collapsed", "collapsed_tenth"]
    curves = {name: [i + 1.0, i + 2.0, i + 4.0] for i, name in enumerate(names)}
    rows = [
        {"t": t} | {f"{n}{end}": c[i] for n, c in curves.items() for end in ("", "_se")}
        for i, t in enumerate((1, 2, 4))
    ]
    figure = probe_figure(rows, np.array([1.5, 1.6, 3.0]))
    drawn = [list(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()]
    assert [ydata for ydata in drawn if len(ydata) == 3] == [*curves.values()]
