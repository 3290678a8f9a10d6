"""Data of another scale than a module expects are told in one line before the first step."""

import math
import warnings

import numpy as np
import pytest
import torch

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.estimators import OneSample
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT, LitMeanFlow, LitSCT
from lit_knn.modules.data_scale import mean_and_deviation
from lit_knn.nets import UNet
from lit_knn.nets.flow import EDMOutput
from lit_knn.reference import ReferenceSet, ShardedReferenceSet
from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY
from tests.networks import write_own
from tests.short_training import train
from tests.toys import pixels, rng
from tests.watched import Images

KINDS = {
    "ict": (LitICT, 0.5, "sigma_data is 0.5"),
    "edm": (LitEDM, 0.5, "sigma_data is 0.5"),
    "ect": (LitECT, 0.5, "sigma_data is 0.5"),
    "sct": (LitSCT, 0.5, "sigma_data is 0.5"),
    "flow": (LitFlow, 1.0, "a flow expects 1"),
    "flow, data": (LitFlow, 0.5, "sigma_data of output is 0.5"),
    "mean flow": (LitMeanFlow, 1.0, "a flow expects 1"),
}


def lines_of_fit(kind, scale, folder, shift=0.0):
    """Fit for one step on images of this deviation and mean; return the lines about them."""
    made, data = KINDS[kind][0], Images()
    unit = torch.nn.functional.normalize(data.x - data.x.mean(0), dim=0) * math.sqrt(60)
    data.x = data.dataset = scale * unit + shift
    data.reference = ReferenceSet(data.x)
    net = UNet(1, channels=8, multipliers=(1, 2), blocks=1, augment_dim=8 * (kind == "mean flow"))
    options = {"start": write_own(folder / "own.ckpt")} if kind == "ect" else {"net": net}
    options |= {"output": EDMOutput} if kind == "flow, data" else {}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        train(made(estimator=OneSample(), **options), data, 1)
    lines = [str(warning.message) for warning in raised]
    return [line for line in lines if line.startswith("the data's")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_deviation_far_from_the_expected_one_is_lines_of_fit(kind, tmp_path):
    _, expected, words = KINDS[kind]
    for factor in (1 / 15, 1 / 3.4, 3.4):
        (line,) = lines_of_fit(kind, factor * expected, tmp_path)
        assert line.startswith(
            f"the data's deviation is {factor * expected:.2g}, {words}: scale the data"
        )
    for factor in (1 / 2.5, 1, 2.5):
        assert lines_of_fit(kind, factor * expected, tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_far_from_0_is_told(kind, tmp_path):
    expected = KINDS[kind][1]
    for factor in (-40, 3.4):
        (line,) = lines_of_fit(kind, expected, tmp_path, shift=factor * expected)
        assert (
            line
            == f"the data's mean is {factor * expected:.2g}, far from 0: subtract it from the data"
        )
    for factor in (-2, 2):
        assert lines_of_fit(kind, expected, tmp_path, shift=factor * expected) == []


def test_equal_values_are_told_without_a_scale_to_set(tmp_path):
    (line,) = lines_of_fit("edm", 0, tmp_path, shift=-1)
    assert (
        line == "the data's deviation is 0, sigma_data is 0.5: all values are -1, look at the data"
    )


def test_the_deviation_is_that_of_all_values():
    images = pixels(5000, (3, 8, 8))
    expected = (images.double() / 127.5 - 1).std(correction=0).item()
    assert mean_and_deviation(ReferenceSet(images, hflip=True))[1] == pytest.approx(
        expected, rel=0.03
    )
    assert mean_and_deviation(ShardedReferenceSet(images))[1] == pytest.approx(expected, rel=0.03)
    # Classes that follow each other differ most.
    sorted_by_class = torch.cat(
        [torch.randn(900, 5000, generator=rng()) + level for level in (-9, 0, 9)]
    )
    assert mean_and_deviation(ReferenceSet(sorted_by_class))[1] == pytest.approx(
        math.sqrt(55), rel=0.02
    )
    assert mean_and_deviation(ReferenceSet(torch.ones(1, 4))) == (1, 0)


def test_a_fit_tells_it_and_images_are_silent(own_folder, recwarn):
    latents = 0.033 * np.random.default_rng(0).standard_normal((64, 1, 8, 8))
    np.save("latents.npy", latents.astype(np.float32))
    other = ["--data", "Arrays", "--data.path", "latents.npy", "--data.batch_size", "16"]
    line = "the data's deviation is 0.033, sigma_data is 0.5: scale the data, or give "
    line += "--model.sigma_data 0.033 and noise levels to match, as lit-knn probe shows"
    main(["fit", "-c", DEMO, *TINY, *other, "--trainer.callbacks", "[]"])
    assert sum(str(warning.message) == line for warning in recwarn) == 1
    recwarn.clear()
    for config in ("demo", "table2/digits", "flow/digits", "meanflow/digits"):
        cli = make_cli(["-c", str(ROOT / "configs" / f"{config}.yaml")], run=False)
        cli.datamodule.setup()
        cli.model.check_scale(cli.datamodule.reference)
    assert not any("deviation" in str(warning.message) for warning in recwarn)
