"""`lit-knn probe`: what it takes from a training, what it writes, and the command that it names."""

import csv
import inspect
import shlex

import numpy as np
import pytest
import torch
import yaml
from pytorch_lightning import LightningModule

from lit_knn import estimators
from lit_knn.commands.next_run import PARTS, PROBE_OPTIONS, command_of_next_run
from lit_knn.commands.probe import draw_latents, options_of
from lit_knn.commands.probed_training import training_of
from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.data import Digits, PointsOnALine
from lit_knn.estimators import OneSample
from lit_knn.metrics import probe
from lit_knn.metrics.edm_constants import Constant
from lit_knn.modules import LitECT, LitEDM, LitEstimator, LitFlow, LitICT, LitMeanFlow, LitSCT
from lit_knn.nets import UNet
from lit_knn.nets.trig_flow import TrigFlow
from lit_knn.sampling.solvers import euler_step
from main import main
from tests import ROOT
from tests.command_lines import refusal_of
from tests.config_files import resolved
from tests.image_files import image_folder
from tests.networks import write_start

pytestmark = pytest.mark.filterwarnings("ignore:.*going on")

CPU = "--trainer.accelerator=cpu"
SMALL = [CPU, "--levels=3", "--latents=16", "--t_min=0.1"]
# What makes a run short enough for a test.
TINY = ["-c", str(ROOT / "tests" / "tiny.yaml"), "--trainer.max_steps=1", "--model.net.channels=8"]


def cpu_trainer():
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", **options)


def of(model, shape=(1, 4, 4)):
    model.trainer = cpu_trainer()
    return training_of(model, shape, 0)


def test_no_levels_are_guessed_for_another_module():
    with pytest.raises(InputError, match="noise levels and loss of LightningModule are not known"):
        training_of(LightningModule(), (1, 4, 4), 0)


# The command


@pytest.mark.usefixtures("blank_figures")
def test_a_probe_goes_on_and_its_settings_are_taken_by_a_fit(tmp_path, monkeypatch, capsys):
    measured, stop, measure_sets = [], [True], probe.measure_sets

    def measure(latents, by_class, bound, number, t):
        if len(measured) == 2 and stop:
            raise KeyboardInterrupt(stop.pop())
        measured.append((t, by_class))
        return measure_sets(latents, by_class, bound, number, t)

    def run(*options):
        main(["probe", *options, *SMALL, f"--out={tmp_path}"])
        settings = yaml.safe_load((tmp_path / "probe.yaml").read_text())["model"]["init_args"]
        rows = list(csv.DictReader((tmp_path / "probe.csv").open()))
        return capsys.readouterr().out, rows, settings

    monkeypatch.setattr(probe, "measure_sets", measure)
    with pytest.raises(SystemExit):
        run("--data", "Digits")
    text, rows, _ = run("--data", "Digits")
    # 16 latents are too few for shares.
    assert "Fewer than 20 latents carry the target noise of EDM" in text
    assert {row[name] for row in rows for name in probe.TARGETS} == {""}
    assert "nan" not in text
    assert "_ms" not in text
    assert [t for t, _ in measured] == pytest.approx([0.1, 8**0.5, 80.0])  # Each level once.

    # With the levels of a run the same measurement serves. 180 of 1,797 are held out by default.
    run_of_config = ("-c", "table2/digits", "--held_out", "0.5", "--data.held_out", "180")
    text, rows, settings = run(*run_of_config)
    assert text.count(" of a pass of the network; how much noise") == 4
    assert (rows[0]["KNN"], rows[0]["collapsed"], rows[0]["latents"]) == ("", "1.0", "16")
    assert settings["sigma_data"] == pytest.approx(0.75, rel=0.01)
    assert settings["sigma_max"] < 20

    # A class-conditional model is probed by class. A consistency model samples from its top level.
    conditional = ("-c", "table1/digits_conditional", "--held_out=0")
    _, rows, settings = run(*conditional, "--model.sampling_sigmas=[80,20,0.8]")
    assert [by_class for _, by_class in measured] == [False] * 3 + [True] * 3
    assert "held_out" not in rows[0]
    assert settings["sampling_sigmas"] == [settings["sigma_max"], 0.8]


@pytest.mark.usefixtures("blank_figures", "own_folder")
@pytest.mark.parametrize("kind", ["images alone", "no constants", "by class"])
def test_the_command_that_a_probe_ends_with_trains(kind, tmp_path, capsys):
    options = {
        "images alone": ["--data", "ImageFiles", f"--data.path={tmp_path / 'own'}"],
        "by class": ["--data", "Digits", "--by_class", "true"],
        "no constants": ["--config=flow/digits", "--by_class", "false", "--seed_everything", "3"],
    }[kind]
    image_folder(tmp_path / "own", 80, (8, 8))
    more_latents = [option.replace("=16", "=64") for option in SMALL]
    main(["probe", *options, *more_latents, "--out", "my probe"])

    last = capsys.readouterr().out.splitlines()[-1]
    program, *command = shlex.split(last.removeprefix("Next: "))
    assert (program, command[0]) == ("lit-knn", "fit")
    assert last in (tmp_path / "my probe" / "probe.yaml").read_text().replace("# Next", "Next")
    main([*command, *TINY, "--trainer.logger.save_dir=runs"])

    (path,) = tmp_path.glob("runs/*/*_0/config.yaml")
    run = yaml.safe_load(path.read_text())
    settings = yaml.safe_load((tmp_path / "my probe" / "probe.yaml").read_text())
    made = run["model"]["init_args"]
    expected = settings["model"]["init_args"]
    assert {name: made[name] for name in expected} == expected
    assert made["estimator"]["class_path"].endswith(("STF", "KNN", "Exact"))
    assert made["net"]["init_args"]["in_channels"] == (3 if kind == "images alone" else 1)
    assert made["class_conditional"] == (kind == "by class")
    assert run["seed_everything"] == (3 if kind == "no constants" else 0)


def test_the_next_command_has_all_options_but_those_of_the_probe(tmp_path):
    trainer, model = cpu_trainer(), LitEDM(UNet(1, 8), OneSample())

    def command(*args, estimator=None, module=model, shape=(1, 8, 8), classes=0):
        trainer.command_line = ["probe", *args]
        return command_of_next_run(
            trainer.command_line, module, shape, tmp_path / "probe.yaml", estimator, classes
        )

    settings = f"-c {tmp_path / 'probe.yaml'}"
    args = ["--levels", "3", "-c", "a", "--out=x", "--config", "b", "--data.held_out", "9"]
    assert command(*args) == f"Next: lit-knn fit -c a --config b {settings} --data.held_out 9"
    args = ["--model", "LitEDM", "--t_max", "9", "--data.path", "my photos"]
    options = "--model LitEDM --data.path 'my photos'"
    assert command(*args) == f"Next: lit-knn fit {settings} {options}"
    ended = command("-c", "a", estimator="SubspaceKNN")
    assert ended.endswith(" --model.estimator estimators/subspace_knn.yaml")
    # Posteriors over the images of a class are those of a model with classes.
    ended = command("-c", "a", "--by_class", "true", classes=3)
    options = "--model.class_conditional true --model.net.num_classes 3"
    assert ended == f"Next: lit-knn fit -c a {settings} {options}"
    # Colour pictures and large ones have a run that takes its network from the data.
    for shape in ((3, 8, 7), (1, 8, 33)):
        said = command("--data.path", "x", module=LitEstimator(), shape=shape)
        assert said == f"Next: lit-knn fit -c photos/edm {settings} --data.path x"
    said = command("--data.path", "x", module=LitEstimator(), shape=(4, 8, 7))
    options = "--data.path x --model.net.in_channels 4"
    assert said == f"Next: lit-knn fit -c table2/digits {settings} {options}"
    # There is no run for vectors or for large latents, and none of a module that does not train.
    unknown = [([], (2,)), ([], (4, 8, 64)), (["-c", "figure3/digits"], (1, 8, 8))]
    for args, shape in unknown:
        said = command(*args, module=LitEstimator(), shape=shape)
        assert said == f"Next, with the config of a training: lit-knn fit -c CONFIG {settings}"


def test_next_command_has_options_and_estimators_of_the_probe():
    options = {*inspect.signature(Trainer.probe).parameters} - {"self", "model", "datamodule"}
    assert {*PROBE_OPTIONS} == options
    assert {*PARTS} == {"OneSample", *probe.TARGETS}
    for name, path in PARTS.items():
        part = resolved(ROOT / "configs" / path)
        assert part["class_path"].endswith(f".{name}")
        # A probe measures the defaults.
        arguments = inspect.signature(getattr(estimators, name)).parameters.items()
        defaults = {
            key: value.default for key, value in arguments if value.kind != value.VAR_KEYWORD
        }
        defaults.pop("args", None)
        assert part.get("init_args", {}) == defaults


def test_bad_options_are_refused(tmp_path, capsys):
    rules = {
        "--held_out=1": "held_out is a share of the images, at least 0 and below 1, got 1; --data.held_out is a",
        "--held_out=180": "below 1, got 180; --data.held_out is a number of them",
        "--latents=1": "at least 2",
        "--levels=1": "levels must be at least 2, got 1",
        "--held_out=-0.1": "held_out is a share of the images, at least 0 and below 1, got -0.1",
        "--held_out=.nan": "below 1, got nan",
    }
    for option, rule in rules.items():
        # The data are read later.
        data = ["--data", "ImageFiles", "--data.path", str(tmp_path / "none")]
        args = ["probe", *data, CPU, option, "--out", str(tmp_path / "probe")]
        assert rule in refusal_of(args, capsys)
    assert not (tmp_path / "probe").exists()


def test_images_are_held_out_of_those_to_train_on():
    def images(latents):
        return latents.reference.images.flatten(1)

    data = Digits(train_images=100)
    data.setup()
    every = data.reference.images.flatten(1)
    parts = draw_latents(Digits(train_images=100), 0.25, 1000, torch.device("cpu"))
    assert [len(images(part)) for part in parts] == [75, 25]
    assert torch.equal(torch.cat([*map(images, parts)]).unique(dim=0), every.unique(dim=0))

    # A tenth of four images is one.
    few = draw_latents(PointsOnALine(num_points=4), 0.1, 1000, torch.device("cpu"))
    assert [len(images(part)) for part in few] == [3, 1]


# What it takes from a training


def test_the_weight_of_a_training_is_that_of_its_loss():
    training = of(LitEDM(UNet(1, 8), OneSample(), P_mean=-0.5, sigma_data=0.7))
    sigma, weight = training.sigma, training.weight
    assert weight * (sigma * 0.7) ** 2 == pytest.approx(sigma**2 + 0.7**2)
    assert np.log(sigma).mean() == pytest.approx(-0.5, abs=5 * 1.2 / len(sigma) ** 0.5)
    assert training.name == "LitEDM"

    mean_flow = LitMeanFlow(UNet(1, 8, augment_dim=8), OneSample())
    for flow in LitFlow(UNet(1, 8), OneSample()), mean_flow:
        training = of(flow)
        ratio = training.sigma / (1 + training.sigma)
        # The velocity is (z − μ)/τ.
        assert training.weight * ratio**2 == pytest.approx(np.ones(len(ratio)))

    # Without a training it is EDM's, and no network has a time.
    training = of(LitEstimator())
    assert (training.name, training.pass_ms) == ("EDM", None)
    assert np.log(training.sigma).mean() == pytest.approx(-1.2, abs=0.02)
    assert np.log(training.sigma).std() == pytest.approx(1.2, abs=0.02)
    assert training.weight * (training.sigma / 2) ** 2 == pytest.approx(training.sigma**2 + 0.25)


def test_consistency_training_counts_with_its_last_levels():
    training = of(LitICT(UNet(1, 8), OneSample(), total_steps=1000, s0=10, s1=1280))
    # At the end of the schedule there are 1,280 intervals, of which 100,000 draws meet nearly all.
    levels = np.unique(training.sigma)
    assert 1100 < len(levels) <= 1280

    # The weight is how far an error moves ẑ.
    r = torch.from_numpy(np.concatenate([[0.002], levels[:-1]]))
    t = torch.from_numpy(levels)
    pairs = (t > 0.5) & (t < 0.6)  # All levels here are met.
    z = torch.zeros(int(pairs.sum()), 1, dtype=torch.float64)
    step = [euler_step(z, t[pairs], r[pairs], lambda z, t, e=error: z + e) for error in (1.0, 0.0)]
    expected = (step[0] - step[1]).flatten().square() / (t - r)[pairs]
    weights = dict(zip(training.sigma, training.weight, strict=True))
    assert [weights[level] for level in levels[pairs]] == pytest.approx(expected.tolist(), rel=1e-6)
    assert training.name.startswith("LitICT (to first order")


def test_continuous_consistency_counts_by_the_tangent_of_a_gaussian():
    model = LitSCT(OneSample(), net=UNet(1, 8), sigma_data=0.5)
    training = of(model)
    sigma = torch.from_numpy(training.sigma[:200]).double()

    def network(x, label):
        """F of a Gaussian with the deviation 0.5, whose consistency function is f(x, t) = x."""
        return -torch.tan(torch.atan((4 * label).exp() / 0.5) / 2)[:, None] * x

    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    flow = TrigFlow.of(z, sigma, 0.5)
    mean = z / (1 + 4 * sigma.square())[:, None]
    assert flow.tangent(network, mean).abs().max() < 1e-10
    moved = flow.tangent(network, mean + 1).square().mean(1)
    assert training.weight[:200].tolist() == pytest.approx(moved.tolist(), rel=1e-5)


class SlowNet(UNet):
    """A network on a clock of its own: an image takes 3 ms forward, 4 ms backward, more the first time."""

    seconds, warm_up = 0.0, 10.0

    def forward(self, z, *labels, **more):
        SlowNet.seconds += 0.003 * len(z) + SlowNet.warm_up
        SlowNet.warm_up = 0.0
        output = super().forward(z, *labels, **more)
        output.register_hook(lambda _: SlowNet.wait(0.004 * len(z)))
        return output

    @classmethod
    def wait(cls, seconds):
        cls.seconds += seconds


def test_a_pass_of_the_network_is_timed_for_one_image(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: SlowNet.seconds)
    assert of(LitEDM(SlowNet(1, 8), OneSample())).pass_ms == pytest.approx(7)


def test_settings_are_those_that_the_module_has(tmp_path):
    constants = {"sigma_data": 0.33333333, "sigma_min": 0.001, "sigma_max": 9.0}
    constants = {name: Constant(value, "a rule") for name, value in constants.items()}
    every = {"sigma_data": 0.3333, "sigma_min": 0.001, "sigma_max": 9.0}
    assert options_of(LitEstimator(), constants) == every
    assert options_of(LitEDM(UNet(1, 8), OneSample()), constants) == every
    assert options_of(LitFlow(UNet(1, 8), OneSample()), constants) == {}
    ict = LitICT(UNet(1, 8), OneSample(), sampling_sigmas=[80.0, 20.0, 0.8])
    assert options_of(ict, constants) == every | {"sampling_sigmas": [9.0, 0.8]}
    # Tuning keeps the sigma_data of the network that it starts from.
    net = UNet(1, 8)
    ect = LitECT(OneSample(), write_start(tmp_path / "start.ckpt", net), net)
    assert options_of(ect, constants) == {}
