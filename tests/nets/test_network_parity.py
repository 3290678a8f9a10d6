"""Networks against recorded outputs of the published architectures: see tests/data/network-parity/README.md."""

import pytest
import torch

from lit_knn.nets import ADM, DDPMpp, NCSNpp, network_from_config
from lit_knn.nets.precond import EDMPrecond
from tests import ROOT

FILES = sorted((ROOT / "tests" / "data" / "network-parity").glob("*.pt"))
CLASSES = {"ddpmpp": DDPMpp, "ncsnpp": NCSNpp, "adm": ADM}


def relative_error(output, expected):
    return ((output - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max().item()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_weights_give_the_recorded_outputs(path):
    recorded = torch.load(path, weights_only=True)
    denoiser = EDMPrecond(network_from_config(recorded["config"])).eval()
    denoiser.load_state_dict(recorded["state_dict"], strict=True)
    assert type(denoiser.model) is CLASSES[path.stem]
    with torch.no_grad():
        raw = denoiser.model(recorded["raw_input"], recorded["raw_noise_labels"])
        denoised = denoiser(recorded["z"], recorded["sigma"])
    assert relative_error(raw, recorded["raw_output"]) < 1e-5
    assert relative_error(denoised, recorded["denoised"]) < 1e-5
    assert denoised.dtype == torch.float32


@pytest.mark.parametrize(
    ("net", "options", "parameters"),
    [
        (DDPMpp, {}, 55_732_739),
        (NCSNpp, {}, 56_395_523),
        (DDPMpp, {"num_classes": 10}, 55_734_147),
        (DDPMpp, {"image_size": 64, "multipliers": (1, 2, 2, 2)}, 61_804_419),
        (ADM, {"num_classes": 1000}, 295_899_267),
        # Each label has one weight per feature of the noise embedding.
        (DDPMpp, {"augment_dim": 9}, 55_732_739 + 9 * 128),
        (NCSNpp, {"augment_dim": 9}, 56_395_523 + 9 * 256),
    ],
)
def test_parameter_counts_are_the_published_ones(net, options, parameters):
    with torch.device("meta"):
        denoiser = EDMPrecond(net(**options))
    assert sum(parameter.numel() for parameter in denoiser.parameters()) == parameters
