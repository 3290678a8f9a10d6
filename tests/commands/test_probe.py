import csv

import numpy as np
import pytest
import torch
import yaml

from lit_knn.commands.cli.cli import make_cli
from lit_knn.commands.probe import conclude, constants, training_of
from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.index import FaissIndex
from lit_knn.metrics import probe
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.modules import LitEDM, LitEstimator, LitFlow, LitICT, LitMeanFlow
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.solvers import euler_step
from main import main
from tests.command_lines import refusal_of
from tests.toys import low_rank_vectors

CPU = "--trainer.accelerator=cpu"


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
        main(["probe", *options, CPU, "--levels=3", "--latents=16", "--t_min=0.1", f"--out={tmp_path}"])
        settings = yaml.safe_load((tmp_path / "probe.yaml").read_text())["model"]["init_args"]
        return capsys.readouterr().out, list(csv.DictReader((tmp_path / "probe.csv").open())), settings

    monkeypatch.setattr(probe, "measure_level", measure)
    with pytest.raises(SystemExit):
        run("--data", "Digits")
    assert "of the target noise of EDM; it costs" in run("--data", "Digits")[0]
    assert [t for t, _ in measured] == pytest.approx([0.1, 8**0.5, 80.0])  # Each level once.
    # With the levels of a run the kept measurement serves, too. The default share that is held out is 180 of 1,797.
    text, rows, settings = run("-c", "table2/digits", "--held_out", "0.5", "--data.held_out", "180")
    assert text.count(" of the target noise of LitEDM; it costs ") == text.count(" of a network pass") == 3
    assert (rows[0]["KNN"], rows[0]["collapsed"], rows[0]["latents"]) == ("", "1.0", "16")
    cli = make_cli(["-c", "table2/digits", "-c", str(tmp_path / "probe.yaml"), CPU], run=False)
    assert cli.model.hparams.sigma_data == settings["sigma_data"] == pytest.approx(0.75, rel=0.01)
    assert cli.model.hparams.sigma_max == settings["sigma_max"] < 20
    # A class-conditional model is probed by class. A consistency model samples from its highest level.
    _, rows, settings = run("-c", "table1/digits_conditional", "--held_out=0", "--model.sampling_sigmas=[80,20,0.8]")
    assert [by_class for _, by_class in measured] == [False] * 3 + [True] * 3
    assert "held_out" not in rows[0]
    assert settings["sampling_sigmas"] == [settings["sigma_max"], 0.8]


@pytest.mark.parametrize("by_class", [False, True])
def test_a_level_is_what_enumeration_says(by_class, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"Exact": Exact, "OneSample": OneSample})
    images, labels, t = low_rank_vectors(80), torch.arange(80) % 2, 0.6
    images[labels == 1] += 3
    sets = [ReferenceSet(images[rows], labels=labels[rows]) for rows in (slice(60), slice(60, 80))]
    drawn = [NoisyLatents(own, 60, 0) for own in sets]
    table = probe.measure(drawn, by_class, [t, 1e4], tmp_path)
    low, tenth = {name: values[0] for name, values in table.items()}, []
    for latents, loss, linear in ((drawn[0], None, "wiener"), (drawn[1], "held_out", "wiener_held_out")):
        z, x = (values.double().numpy() for values in latents.batch(range(len(latents.ids)), t))
        classes = latents.reference.labels[latents.ids]
        # By class, a level lists its latents in the order of their classes.
        for place, i in enumerate(classes.argsort(stable=True) if by_class else range(len(z))):
            own = sets[0].images[sets[0].labels == classes[i] if by_class else slice(None)].double().numpy()
            p, m, covariance = posterior(own, z[i], t), own.mean(0), np.cov(own.T, bias=True)
            filtered = m + np.linalg.solve(covariance + t**2 * np.eye(12), covariance) @ (z[i] - m)
            assert low[linear][place] == pytest.approx(((filtered - x[i]) ** 2).mean(), rel=1e-3)  # float32 components
            # float32 images and latents, of size about 5, differ from float64 only in sums of 60 terms.
            if loss:
                assert low[loss][place] == pytest.approx(((x[i] - p @ own) ** 2).mean(), rel=1e-6)
                continue
            assert low["irreducible"][place] == pytest.approx(p @ ((own - p @ own) ** 2).mean(1), rel=1e-6)
            assert low["images"][place] == pytest.approx(np.exp(-(p * np.log(p + 1e-300)).sum()), rel=1e-6)
            assert low["collapsed"][place] == (p.max() > 0.99)
            few = [p * ((np.arange(len(p)) % 10 == 0) | (np.arange(len(p)) == j)) for j in range(len(p))]
            tenth.append(sum(p[j] for j, rest in enumerate(few) if rest.max() > 0.99 * rest.sum()))
            for level in table["variance"][0], table["irreducible"][1]:  # At t = 1e4 the posterior is uniform.
                assert level[place] == pytest.approx(np.trace(covariance) / 12, rel=1e-3)
    # A tenth has the drawn source, too, so its collapse has a probability.
    deviation = sum(share * (1 - share) for share in tenth) ** 0.5
    assert low["collapsed_tenth"].sum() == pytest.approx(sum(tenth), abs=4 * deviation)
    assert low["Exact"].max() < 1e-9  # It errs only by the rounding of float32.
    # One sample has the variance of the posterior on average, because its source is drawn from there.
    more = low["OneSample"] - low["irreducible"]
    assert 0 < more.mean().abs() < 4 * more.std() / 60**0.5


def posterior(x, z, t):
    """Probabilities of x (N, d) at z (d,), in NumPy."""
    log_p = -((z - x) ** 2).sum(1) / (2 * t**2)
    p = np.exp(log_p - log_p.max())
    return p / p.sum()


def test_a_level_is_kept_for_equal_data_and_settings_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"OneSample": OneSample})
    measured, measure_level = [], probe.measure_level
    monkeypatch.setattr(probe, "measure_level", lambda *args: measured.append(len(args[2])) or measure_level(*args))

    def levels(by_class=False, classes=2, index=None, num=10, seed=0, t=(0.5, 1.0), held_out=10):
        """The number of levels that are measured anew."""
        parts = low_rank_vectors(60).split([60 - held_out, held_out])
        sets = [ReferenceSet(x, index, labels=torch.arange(len(x)) % classes) for x in parts]
        measured.clear()
        probe.measure([NoisyLatents(own, num, seed) for own in sets], by_class, t, tmp_path)
        return measured.count(2)

    assert [levels(), levels(), levels(classes=3)] == [2, 0, 0]
    assert [levels(by_class=True), levels(by_class=True), levels(by_class=True, classes=3)] == [2, 0, 2]
    for change in ({"index": FaissIndex("SQ8")}, {"num": 9}, {"seed": 1}, {"t": (0.5, 2.0)}, {"held_out": 20}):
        assert levels(**change) == 2


def test_data_without_an_answer_is_refused(tmp_path):
    for images, classes, rule in (
        (torch.full((9, 4), 0.3), 0, "the images do not differ"),
        (torch.arange(3.0).repeat(3).unsqueeze(1), 3, "images of each class do not differ"),
        (torch.randn(9, 4), 2, "all images of class 2 are held out"),
    ):
        sets = [ReferenceSet(images, labels=torch.arange(9) % max(classes, 1)), ReferenceSet(images, labels=9 * [2])]
        with pytest.raises(InputError, match=rule):
            probe.measure([NoisyLatents(own, 9, 0) for own in sets], classes > 0, [0.5], tmp_path)


def test_the_weight_of_a_training_is_that_of_its_loss():
    def of(model):
        model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        return training_of(model, (1, 4, 4), 0)[1:3]

    sigma, weight = of(LitEDM(UNet(1, 8), OneSample(), P_mean=-0.5, sigma_data=0.7))
    assert weight * (sigma * 0.7) ** 2 == pytest.approx(sigma**2 + 0.7**2)
    assert np.log(sigma).mean() == pytest.approx(-0.5, abs=5 * 1.2 / len(sigma) ** 0.5)
    for flow in LitFlow(UNet(1, 8), OneSample()), LitMeanFlow(UNet(1, 8, augment_dim=8), OneSample()):
        sigma, weight = of(flow)
        assert weight * (sigma / (1 + sigma)) ** 2 == pytest.approx(np.ones(len(sigma)))  # The velocity is (z − μ)/τ.
    # In consistency training the weight is how far an error moves ẑ.
    weight = of(model := LitICT(UNet(1, 8), OneSample()))[1]
    t, r = model.draw_levels(len(weight), torch.Generator().manual_seed(1))
    z = torch.zeros(len(t), 1, dtype=torch.float64)
    moved = euler_step(z, t, r, lambda z, t: z + 1) - euler_step(z, t, r, lambda z, t: z)
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
    # Half of the latents have 0 and half 2/5 of the noise: 0.2·sqrt(8/7)/sqrt(8). Three quarters of the levels cost 3.
    # Between 1/16 and 1/8 the collapse falls from 1 to 0. Between 16 and 32 the rest of the variance falls from 0.0196.
    for said in (
        f"STF removes {1 - (0.04 + 0.04 / 16) / 2:.2%} ± 0.00%",
        f"KNN removes 80.00% ± {0.2 / 7**0.5:.2%} of the target noise of a run; it costs 2.5 ms an image, 42% of",
        f"up to level {2**-3.99:.3g} at",
        f"a tenth of the images that level is {2**-2.99:.3g}. 75.0% of the noise levels are above",
        "up to level 4; above it",
        "50.0% of the target noise is between these levels. Above level 22.5 ",
        "2.5% of the noise levels are outside",
    ):
        assert said in text
    assert "Nothing to gain" not in text
    table |= {"STF": table["irreducible"], "collapsed_tenth": 0 * table["collapsed_tenth"]}
    text = " ".join(conclude(t, table, ("a run", np.repeat([1 / 60, 1], [995, 5]), np.ones(1000), 6.0)))
    for said in ("Nothing to gain", "that level is <0.0156. 0.5% of", "up to level >64; above it"):
        assert said in text


def test_constants_are_those_of_all_pairs_and_values():
    images = low_rank_vectors(50)
    pairs = torch.cdist(images.double(), images.double())
    largest, nearest = pairs.max().item(), pairs.fill_diagonal_(torch.inf).amin(1).median().item()
    values, lines = constants(NoisyLatents(ReferenceSet(images), 50, 0), LitEstimator())
    sigma = images.double().std(correction=0).item()
    assert [*values.values()] == pytest.approx([sigma, 0.004 * sigma, largest], rel=1e-3)  # Four digits.
    assert f"the nearest image is {nearest:.3g} away (median)" in lines[2]
    assert ["does not fit" in line for line in lines] == [False, True, True, True]


def test_bad_options_are_refused(tmp_path, capsys):
    rules = {"--held_out=1": "data.held_out=1797 needs at least 1798", "--latents=1": "at least 2"}
    for option, rule in {**rules, "--held_out=-0.1": "held_out must be at least 0, got -0.1"}.items():
        assert rule in refusal_of(["probe", "--data", "Digits", CPU, option, "--out", str(tmp_path / "probe")], capsys)
    assert not (tmp_path / "probe").exists()
