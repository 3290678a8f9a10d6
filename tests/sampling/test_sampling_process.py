"""The option `process`: samplers of every process reach the same images as steps grow, and files name the process."""

from functools import cache

import pytest
import torch

import lit_knn
from lit_knn.commands.export import export
from lit_knn.common.errors import InputError
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitEstimator
from lit_knn.nets import UNet
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling import DiffusionModel
from lit_knn.sampling.loading import build
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.theory.noise import VP, LinearInterpolant, Process
from tests.trained_runs import leave_run

OTHERS = [VP(), VP(10.0, 0.5), LinearInterpolant()]
named = pytest.mark.parametrize("process", OTHERS, ids=["VP", "VP with options", "linear"])


def model(process=None) -> DiffusionModel:
    torch.manual_seed(0)
    net = UNet(1, 8, (1, 2), 1)
    torch.nn.init.normal_(net.conv_out.weight, std=0.05)
    options = {} if process is None else {"process": process}
    return DiffusionModel(EDMPrecond(net, 0.5), (1, 8, 8), NoiseGrid(0.02, 10.0), **options).eval()


@cache
def usual(steps):
    return model().sample([0, 1], steps)


@named
def test_images_agree_as_steps_grow_and_differ_with_few(process):
    error = [(usual(steps) - model(process).sample([0, 1], steps)).abs().max().item() for steps in (4, 96)]
    assert error[1] < 2e-3
    assert error[0] > 3 * error[1]


@named
def test_a_file_names_the_process(process):
    own = model(process)
    read = build(own.description(), dict(own.net.state_dict()))
    assert torch.equal(read.sample([3], 4), own.sample([3], 4))
    assert vars(read.process) == vars(process)


def test_a_file_without_a_process_has_edms():
    assert "process" not in model().options()


class Own(Process):
    """σ(t) = t²; a user's process, which no file can name."""

    def sigma(self, t):
        return t.square()

    def scale(self, t):
        return torch.ones_like(t)


def test_a_process_of_ones_own_samples_but_no_file_can_make_it():
    own = model(Own())
    torch.testing.assert_close(own.sample([0], 96), model().sample([0], 96), rtol=0, atol=2e-3)
    with pytest.raises(InputError, match="process must name one of EDM, VP, LinearInterpolant as its class"):
        build(own.description(), dict(own.net.state_dict()))


class Bounded(Own):
    def sigma(self, t):
        return torch.tanh(t)


@pytest.mark.parametrize("module", [LitEDM, LitEstimator])
def test_a_process_without_the_noise_levels_is_refused(module):
    with pytest.raises(InputError, match=r"Lit(EDM|Estimator): Bounded: no t has the noise level σ\(t\)=80"):
        module(process=Bounded(), **({"net": UNet(1, 8, (1,)), "estimator": OneSample()} if module is LitEDM else {}))


def test_the_command_line_takes_a_process(tmp_path):
    process = ("--model.process", "lit_knn.theory.noise.VP", "--model.process.beta_d", "10")
    run, _ = leave_run(tmp_path, "edm", *process)
    export(run, tmp_path / "exported")
    for made in (lit_knn.load(run), lit_knn.load(tmp_path / "exported")):
        assert vars(made.process) == vars(VP(10.0))
