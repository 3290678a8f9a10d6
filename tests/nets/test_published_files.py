"""Reads published EDM pickles without running their code; hostile and damaged ones are refused with one line."""

import pickle
import pickletools
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Network
from lit_knn.nets import ADM, DDPMpp, NCSNpp
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.nets.published.safe_pickle import load_safely
from lit_knn.sampling.loading import convert, load_network
from tests import ROOT
from tests.edm_pickles import Call, module, network, number, persistent, published, state_of, write
from tests.image_files import refusal

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
FAMILIES = {"uncond_vp": DDPMpp, "cond_ve": NCSNpp, "cond_adm": ADM}
NUMBERS = [
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
]


def relative_errors(output, expected):
    assert output.shape == expected.shape
    return (output - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


@pytest.mark.skipif(
    not GENUINE.is_dir(),
    reason="no ../shared/data/edm-pickles with networks that NVIDIA's code wrote",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_genuine_file_gives_the_outputs_of_its_own_code(name, tmp_path):
    record = torch.load(GENUINE / f"{name}.pt", weights_only=True)
    path, converted = GENUINE / f"{name}.pkl", tmp_path / "out.safetensors"
    z, sigma, labels, expected = (record[part] for part in ("z", "sigma", "labels", "denoised"))
    convert(path, converted)
    for file in (path, converted):
        denoiser = load_network(file)
        assert type(denoiser.model) is FAMILIES[name]
        for output in (
            denoiser(z, sigma, labels),
            Network(file).posterior_mean(z, sigma, labels=labels),
        ):
            assert relative_errors(output, expected).max() <= 1e-5
    # Labels change the output; otherwise the outputs would agree even without these parts.
    assert (denoiser.model.num_classes == 0) == (labels is None)
    if labels is not None:
        for other in (None, labels + 1):
            assert relative_errors(denoiser(z, sigma, other), expected).max() > 1e-3
    config, _ = read_edm_pickle(path)
    assert config["model_type"] == ("DhariwalUNet" if name == "cond_adm" else "SongUNet")
    assert config["use_fp16"] is (name == "cond_adm")


@pytest.mark.parametrize("protocol", [4, 5])
def test_reads_names_values_and_configuration_and_runs_nothing(tmp_path, protocol, monkeypatch):
    touched = []
    # Python's unpickler would call this function, if the module were there.
    module = SimpleNamespace(_reconstruct_persistent_obj=touched.append)
    monkeypatch.setitem(sys.modules, "torch_utils.persistence", module)
    ema, expected = network(tmp_path / "marker")
    path = write(tmp_path / "edm.pkl", published(ema, tmp_path / "marker"), protocol)
    modules = set(sys.modules)
    config, weights = read_edm_pickle(path)
    assert set(sys.modules) == modules
    assert not touched
    assert not (tmp_path / "marker").exists()
    of_the_network = {
        "model_type": "SongUNet",
        "img_resolution": 16,
        "img_channels": 3,
        "label_dim": 10,
    }
    of_the_denoiser = {
        "sigma_min": 0,
        "sigma_max": float("inf"),
        "sigma_data": 0.5,
        "use_fp16": False,
    }
    assert config.items() >= {**of_the_network, **of_the_denoiser, "model_channels": 4}.items()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert not any(value.requires_grad for value in weights.values())


def test_numpy_numbers_and_tensor_views_keep_their_values(tmp_path):
    limits = [(np.iinfo if issubclass(kind, np.integer) else np.finfo)(kind) for kind in NUMBERS]
    scalars = [
        kind(value)
        for kind, limit in zip(NUMBERS, limits, strict=True)
        for value in (limit.min, limit.max)
    ]
    scalars += [np.float64(1 / 3), np.float64("-0.0"), np.bool_(True)]
    for core in ("numpy.core", "numpy._core"):
        found = load_safely(write(tmp_path / "a.pkl", [number(value, core) for value in scalars]))
        assert [(type(value), str(value)) for value in found] == [
            (type(s.item()), str(s.item())) for s in scalars
        ]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        whole = torch.arange(60).reshape(3, 4, 5).to(dtype)
        tensors = {"view": whole[1:, ::2, 1:].transpose(0, 2), "scalar": whole[2, 3, 4]}
        ema, _ = network()
        state_of(ema, "model")["_parameters"].update({**tensors, "again": tensors["scalar"]})
        weights = read_edm_pickle(write(tmp_path / "a.pkl", ema))[1]
        for name, value in tensors.items():
            assert weights[f"model.{name}"].dtype == dtype
            assert torch.equal(weights[f"model.{name}"], value)
        # Each weight has its own memory, and not more than it needs.
        assert weights["model.view"].untyped_storage().nbytes() == tensors["view"].nbytes
        weights["model.scalar"].zero_()
        assert torch.equal(weights["model.again"], tensors["scalar"])


# Files that try to run code

CALLS = [
    ("os", "system", "touch {marker}"),
    ("builtins", "getattr", "", "__class__"),
    ("torch", "load", "{marker}"),
    ("collections", "OrderedDict.fromkeys", "ab"),
    ("lit_knn.nets.published.safe_pickle", "load_safely"),
    ("os", "\x1b[2J"),
]
# These functions put a hostile object at a place of the file.
PLACES = {
    "root": lambda ema, hostile: hostile,
    "beside": lambda ema, hostile: {**published(ema), "loss_fn": hostile},
    "deep": lambda ema, hostile: (
        state_of(ema, "model")["_parameters"].update(deep=hostile) or published(ema)
    ),
    "argument": lambda ema, hostile: state_of(ema).update(img_resolution=hostile) or published(ema),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_global_outside_the_table_is_refused_by_name(tmp_path, place):
    for package, name, *args in CALLS:
        hostile = Call(package, name, *[part.format(marker=tmp_path / "marker") for part in args])
        path = write(tmp_path / "a.pkl", PLACES[place](network()[0], hostile))
        modules = set(sys.modules)
        printed = name.replace("\x1b", r"\x1b")
        assert f"{path} names the global {package}.{printed}, which is refused" == refusal(
            read_edm_pickle, path
        )
        assert not (tmp_path / "marker").exists()
        assert set(sys.modules) == modules


def stored(data):
    """A file with the values of a tensor."""
    return Call("torch.storage", "_load_from_bytes", data)


# The file that `torch.save` writes for the values of a tensor
VALUES = next(
    part
    for _, part, _ in pickletools.genops(pickle.dumps(torch.arange(3.0)))
    if isinstance(part, bytes)
)


def test_a_pickle_inside_the_values_of_a_tensor_is_refused(tmp_path):
    hostile = f"cos\nsystem\n(S'touch {tmp_path / 'marker'}'\ntR.".encode()
    path = write(tmp_path / "a.pkl", stored(hostile))
    assert refusal(load_safely, path) == f"{path} names the global os.system, which is refused"
    assert not (tmp_path / "marker").exists()
    big_endian, count = re.subn(rb"(?<=little_endianq.)\x88", b"\x89", VALUES)
    assert count == 1
    assert "a tensor in an unknown format" in refusal(load_safely, write(path, stored(big_endian)))


DICT, FUNCTION = b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_parameter\n"
REFUSED = [
    (b"(S'touch marker'\nios\nsystem\n.", "uses the pickle opcode STRING, which is refused"),
    (b"(ios\nsystem\n.", "uses the pickle opcode INST, which is refused"),
    (b"\x80\x02csubprocess\nPopen\n)\x81.", "names the global subprocess.Popen, which is refused"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names the global os.system, which is refused"),
    (b"Pos.system\n.", "uses the pickle opcode PERSID, which is refused"),
    # Attributes, calls and methods of what the machine makes
    (FUNCTION + b"}\x8c\x01aNsb.", "is no pickle of an EDM network"),
    (DICT + b")R}\x8c\x05itemsNsb.", "is no pickle of an EDM network"),
    (DICT + b")R)R.", "is no pickle of an EDM network"),
]


def test_what_the_machine_does_not_do_is_refused(tmp_path):
    path = tmp_path / "a.pkl"
    for code, message in REFUSED:
        path.write_bytes(code)
        assert message in refusal(read_edm_pickle, path)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    views = [
        (0, (2**40,), (0,)),
        (0, (4,), (1,)),
        (2, (2,), (1,)),
        (-1, (1,), (1,)),
        (0, (2, 2), (2,)),
    ]
    for offset, size, stride in [(0, (3,), (1,)), *views]:
        view = Call(
            "torch._utils", "_rebuild_tensor_v2", stored(VALUES), offset, size, stride, False, {}
        )
        path = write(tmp_path / "a.pkl", view)
        if size == (3,):
            assert load_safely(path).to_tensor().tolist() == [0, 1, 2]
        else:
            assert "which is refused" in refusal(load_safely, path) or "damaged" in refusal(
                load_safely, path
            )


# Damaged and unsuitable files


def test_damaged_and_foreign_files_end_in_one_line_or_are_read(tmp_path):
    path = write(tmp_path / "a.pkl", published(network()[0]))
    rng, data, messages = random.Random(0), path.read_bytes(), []
    for end in (0, 1, 2, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        messages.append(refusal(read_edm_pickle, path))
    for content in (b"hello\n", b"PK\x03\x04" + b"\x00" * 30, b"<html></html>"):
        path.write_bytes(content)
        messages.append(refusal(read_edm_pickle, path))
    assert all(
        "is no pickle of an EDM network, or a damaged one" in message for message in messages[1:]
    )
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_edm_pickle(path)
        except InputError as error:
            messages.append(str(error))
    assert 20 < len(messages) < 100
    assert all(message.startswith(str(path)) and message.isprintable() for message in messages)


VP = "must be an EDMPrecond, got 'VPPrecond': other preconditionings, as in the published"
LACKS = "the network lacks its configuration or some of its weights"


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"G": 1, "D": 2}, "must be an EDMPrecond, got 'dict'"),
        ({"ema": None}, "must be an EDMPrecond, got 'NoneType'"),
        (persistent("VPPrecond"), VP),
        (module("EDMPrecond"), LACKS),
        (module("EDMPrecond", modules={"model": module("SongUNet", {"a": 1})}), LACKS),
    ],
)
def test_what_is_not_an_edm_network_is_refused(tmp_path, root, message):
    assert message in refusal(read_edm_pickle, write(tmp_path / "a.pkl", root))
