"""Networks that NVIDIA's code pickled give NVIDIA's outputs; the tests' own pickles have the same format."""

import pickletools
import sys

import pytest
import torch

from lit_knn.estimators import Network
from lit_knn.nets import ADM, DDPMpp, NCSNpp
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.sampling.loading import convert, load_network
from tests import ROOT
from tests.edm_pickles import module_that_records
from tests.networks import small_published, write_published

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
FAMILIES = {"uncond_vp": DDPMpp, "cond_ve": NCSNpp, "cond_adm": ADM}
STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "UNICODE"}

pytestmark = pytest.mark.skipif(
    not GENUINE.is_dir(), reason="no ../shared/data/edm-pickles with networks pickled by NVIDIA's code"
)
EACH = pytest.mark.parametrize("name", FAMILIES)


def relative_errors(output, expected):
    assert output.shape == expected.shape
    return (output - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


@EACH
def test_a_genuine_file_gives_the_outputs_of_its_own_code(name, tmp_path):
    record = torch.load(GENUINE / f"{name}.pt", weights_only=True)
    path, converted = GENUINE / f"{name}.pkl", tmp_path / "out.safetensors"
    z, sigma, labels, expected = (record[part] for part in ("z", "sigma", "labels", "denoised"))
    convert(path, converted)
    for file in (path, converted):
        denoiser = load_network(file)
        assert type(denoiser.model) is FAMILIES[name]
        for output in (denoiser(z, sigma, labels), Network(file).posterior_mean(z, sigma, labels=labels)):
            assert relative_errors(output, expected).max() <= 1e-5
    # Labels change the output; otherwise the outputs would agree even without these parts.
    assert (denoiser.model.num_classes == 0) == (labels is None)
    if labels is not None:
        for other in (None, labels + 1):
            assert relative_errors(denoiser(z, sigma, other), expected).max() > 1e-3


@EACH
def test_a_genuine_configuration_holds_plain_values_and_nothing_is_imported(name):
    with module_that_records("torch_utils.persistence") as touched:
        read_edm_pickle(GENUINE / f"{name}.pkl")
    assert not touched
    modules = set(sys.modules)
    config, _ = read_edm_pickle(GENUINE / f"{name}.pkl")
    assert set(sys.modules) == modules
    assert config["model_type"] == ("DhariwalUNet" if name == "cond_adm" else "SongUNet")
    assert config["use_fp16"] is (name == "cond_adm")
    pending = list(config.values())
    for value in pending:
        assert type(value) in (bool, int, float, str, list)
        pending += value if isinstance(value, list) else []


def contents(path):
    """The opcodes and globals of a pickle with protocol 4; the two strings before a global are its name."""
    opcodes, names, memo, texts = set(), set(), [], []
    last: object = None
    for opcode, argument, _ in pickletools.genops(path.read_bytes()):
        opcodes.add(opcode.name)
        if opcode.name == "MEMOIZE":
            memo.append(last)
            continue
        if opcode.name == "STACK_GLOBAL":
            names.add(tuple(texts[-2:]))
        last = None
        if opcode.name in STRINGS or opcode.name.endswith("BINGET"):
            last = argument if opcode.name in STRINGS else memo[argument]
            texts.append(last)
    return opcodes, names


@EACH
def test_the_pickles_of_the_tests_hold_what_a_genuine_file_holds(name, tmp_path):
    net = small_published(FAMILIES[name], channels=64, num_classes=3)
    opcodes, names = contents(write_published(tmp_path / "own.pkl", net))
    genuine_opcodes, genuine_names = contents(GENUINE / f"{name}.pkl")
    assert ("numpy.core.multiarray", "scalar") in genuine_names
    assert ("dnnlib.util", "EasyDict") in genuine_names
    assert genuine_names <= names
    assert genuine_opcodes <= opcodes
