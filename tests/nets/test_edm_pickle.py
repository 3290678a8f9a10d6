"""Reads published EDM pickles without running their code; hostile and damaged ones are refused with one line."""

import io
import pickle
import pickletools
import random
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.nets.published.safe_pickle import load_safely
from tests.edm_pickles import (
    CONFIG,
    NUMPY_1,
    NUMPY_2,
    Call,
    module_that_records,
    network,
    persistent,
    published,
    write,
)

NUMBERS = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
NUMBERS += [np.float16, np.float32, np.float64]


def refused(path):
    """The one-line error of reading `path`; it names the file."""
    with pytest.raises(InputError) as caught:
        read_edm_pickle(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    return message


def refused_bytes(folder, code):
    (folder / "a.pkl").write_bytes(code)
    return refused(folder / "a.pkl")


def assert_same(state_dict, expected):
    assert state_dict.keys() == expected.keys()
    for name, value in expected.items():
        assert state_dict[name].dtype == value.dtype
        assert torch.equal(state_dict[name], value), name


@pytest.fixture
def benign(tmp_path):
    ema, expected = network(tmp_path / "marker")
    return write(tmp_path / "edm.pkl", published(ema, tmp_path / "marker")), expected


# Benign files


@pytest.mark.parametrize("core", [NUMPY_1, NUMPY_2])
@pytest.mark.parametrize("protocol", [4, 5])
def test_reads_names_values_and_configuration_of_every_writer(tmp_path, protocol, core):
    ema, expected = network(tmp_path / "marker")
    path = write(tmp_path / "edm.pkl", published(ema, tmp_path / "marker"), protocol, core)
    config, state_dict = read_edm_pickle(path)
    assert config == CONFIG
    assert_same(state_dict, expected)
    assert all(value.is_contiguous() and not value.requires_grad for value in state_dict.values())
    assert not (tmp_path / "marker").exists()
    # Numbers of NumPy become the numbers that NumPy says.
    scalars = [kind(value) for kind in NUMBERS for value in extremes(kind)]
    found = load_safely(write(tmp_path / "a.pkl", scalars, protocol, core))
    assert [(type(value), value) for value in found] == [(type(s.item()), s.item()) for s in scalars]
    kwargs = {"img_resolution": np.int64(16), "img_channels": np.uint8(3), "channel_mult": [np.int8(1), np.int16(2)]}
    config, _ = read_edm_pickle(write(tmp_path / "a.pkl", network(kwargs=kwargs)[0], protocol, core))
    assert (config["img_resolution"], config["img_channels"], config["channel_mult"]) == (16, 3, [1, 2])


def extremes(kind):
    if kind is np.bool_:
        return [True, False]
    if issubclass(kind, np.integer):
        return [np.iinfo(kind).min, -1 if np.iinfo(kind).min else 1, np.iinfo(kind).max]
    return [np.finfo(kind).smallest_subnormal, -0.0, 1 / 3, np.finfo(kind).max, np.inf]


def test_imports_nothing(benign):
    with module_that_records("torch_utils.persistence") as touched:
        read_edm_pickle(benign[0])
    assert not touched
    modules = set(sys.modules)
    read_edm_pickle(benign[0])
    assert set(sys.modules) == modules


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_element_types_and_views(tmp_path, dtype):
    whole = torch.arange(60).reshape(3, 4, 5).to(dtype)
    tensors = {"view": whole[1:, ::2, 1:].transpose(0, 2), "scalar": whole[2, 3, 4]}
    ema, _ = network(modules={"model": persistent("SongUNet", buffers=tensors)})
    state_dict = read_edm_pickle(write(tmp_path / "a.pkl", ema))[1]
    assert_same(state_dict, {f"model.{name}": value for name, value in tensors.items()})
    assert state_dict["model.view"].untyped_storage().nbytes() == tensors["view"].nbytes


# Files that try to run code

CALLS = [
    ("os", "system", "touch {marker}"),
    ("builtins", "eval", "open({marker!r}, 'w')"),
    ("builtins", "open", "{marker}", "w"),
    ("builtins", "getattr", "", "__class__"),
    ("builtins", "bytearray", 10**13),
    ("torch", "load", "{marker}"),
    ("torch._utils", "_rebuild_parameter.__globals__"),
    ("torch.storage", "UntypedStorage", 10**13),
    ("collections", "OrderedDict.fromkeys", "ab"),
    ("torch_utils.persistence", "import_hooks.append"),
    ("lit_knn.nets.published.safe_pickle", "load_safely"),
    ("numpy", "zeros", 10**13),
    ("numpy.core.multiarray", "scalar.__self__"),
    ("numpy.core.multiarray", "_reconstruct"),
]
# These functions put a hostile object at a place of the file.
PLACES = {
    "root": lambda hostile: hostile,
    "beside": lambda hostile: {**published(network()[0]), "loss_fn": hostile},
    "deep": lambda hostile: published(network(deep=hostile)[0]),
    "argument": lambda hostile: published(network(kwargs={"img_resolution": hostile})[0]),
}
CASES = [(call, "deep") for call in CALLS] + [(CALLS[0], place) for place in PLACES if place != "deep"]


@pytest.mark.parametrize(("call", "place"), CASES)
def test_a_global_outside_the_table_is_refused_by_name(tmp_path, call, place):
    module, name, *args = call
    hostile = Call(module, name, *[a.format(marker=tmp_path / "marker") if isinstance(a, str) else a for a in args])
    path = write(tmp_path / "a.pkl", PLACES[place](hostile))
    modules = set(sys.modules)
    assert f"the global {module}.{name}, which is refused" in refused(path)
    assert not (tmp_path / "marker").exists()
    assert set(sys.modules) == modules


def storage_bytes(position=None, hostile=b""):
    """The file that `torch.save` writes for the values 0, 1, 2, with one of its five pickles replaced."""
    opcodes = pickletools.genops(pickle.dumps(torch.arange(3.0)))
    stream = io.BytesIO(next(argument for _, argument, _ in opcodes if isinstance(argument, bytes)))
    parts = []
    for _ in range(5):
        start = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        parts.append(stream.getvalue()[start : stream.tell()])
    if position is not None:
        parts[position] = hostile
    return b"".join(parts) + stream.read()


def test_a_pickle_inside_the_values_of_a_tensor_is_refused(tmp_path):
    hostile = f"cos\nsystem\n(S'touch {tmp_path / 'marker'}'\ntR.".encode()
    for position in range(5):
        nested = Call("torch.storage", "_load_from_bytes", storage_bytes(position, hostile))
        message = refused(write(tmp_path / "a.pkl", network(deep=nested)[0]))
        assert "the global os.system, which is refused" in message
    assert not (tmp_path / "marker").exists()


# Parts of pickles
TEXT = b"\x8c\x01a"
DICT, RECORD = b"ccollections\nOrderedDict\n", b"ctorch.nn.modules.container\nModuleDict\n"
FUNCTION, DTYPE = b"ctorch._utils\n_rebuild_parameter\n", b"cnumpy\ndtype\n\x8c\x02f8\x85R"


REFUSED = [
    (b"(S'touch {}'\nios\nsystem\n.", "the pickle opcode STRING"),
    (b"(ios\nsystem\n.", "the pickle opcode INST"),
    (b"(" + FUNCTION + TEXT + b"o.", "the pickle opcode OBJ"),
    (FUNCTION + b")}\x92.", "the pickle opcode NEWOBJ_EX"),
    (b"\x80\x02csubprocess\nPopen\n)\x81.", "the global subprocess.Popen"),  # NEWOBJ
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "the global os.system"),  # STACK_GLOBAL
    (b"\x80\x04\x8c\x02os)\x93.", "by something other than text"),
    (b"cos\n\x1b[2J\n.", "the global os.\\x1b[2J"),
    (TEXT + b")R.", "calls something other than a global"),
    (DICT + b"]R.", "calls something other than a global"),
    (b"ctorch\nFloatStorage\n)R.", "calls something other than a global"),
    (b"Pos.system\n.", "the pickle opcode PERSID"),
    # Attributes, and methods that Python's unpickler calls
    (FUNCTION + b"}" + TEXT + b"Nsb.", "sets the state of a Name"),
    (DICT + b")R}\x8c\x05itemsNsb.", "sets the state of a dict"),
    (FUNCTION + TEXT + b"a.", "APPEND on a Name"),
    (RECORD + b")\x81" + TEXT + b"Ns.", "SETITEM on a Record"),
    (b"](" + TEXT + b"\x90.", "ADDITEMS on a list"),
    (b"})Ns.", "keys other than text"),
]


def test_what_the_machine_does_not_do_is_refused(tmp_path):
    for code, message in REFUSED:
        assert f"{message}, which is refused" in refused_bytes(tmp_path, code)


# Small files that ask for much memory or time


def rebuild(storage, offset, size, stride):
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, size, stride, False, {})


def tensor_module(tensor):
    return {"model": persistent("SongUNet", {"a": tensor})}


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    storage = Call("torch.storage", "_load_from_bytes", storage_bytes())
    good = write(tmp_path / "good.pkl", network(modules=tensor_module(rebuild(storage, 0, (3,), (1,))))[0])
    assert read_edm_pickle(good)[1]["model.a"].tolist() == [0, 1, 2]
    views = [(0, (2**40,), (0,)), (0, (4,), (1,)), (2, (2,), (1,)), (-1, (1,), (1,)), (0, (2, 2), (2,))]
    views += [(0, (2,), (-1,)), (0, (1,) * 1000, (1,) * 1000), (0, (0.5,), (1,)), (2**70, (1,), (1,))]
    views += [(0, (2,), (2**70,)), (0, (0, 2**60), (1, 1))]
    for view in views:
        refused(write(tmp_path / "a.pkl", network(modules=tensor_module(rebuild(storage, *view)))[0]))
    # A storage that claims more or fewer values than it has
    data = storage_bytes()
    for damaged in (data[:-1], data + b"\0", data[:-20] + struct.pack("<q", 2**40) + data[-12:]):
        storage = Call("torch.storage", "_load_from_bytes", damaged)
        ema, _ = network(modules=tensor_module(rebuild(storage, 0, (1,), (1,))))
        assert "too many or too few values" in refused(write(tmp_path / "a.pkl", ema))


# A tuple that holds the one before twice, and so on: its hash or its text would take forever.
DOUBLED = b")" + b"".join(b"\x94h%c\x86" % i for i in range(100))
LENGTH = struct.pack("<Q", 2**60)


# Each of these asks for much more memory or time than the file has bytes.
HUGE = [
    b"\x80\x02Nr\xff\xff\xff\x7f.",  # memo index 2^31
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",  # frame
    b"\x80\x04\x8b\xff\xff\xff\x7f.",  # LONG4
    *(b"\x80\x04" + opcode + LENGTH + b"." for opcode in (b"\x8d", b"\x8e", b"\x96")),
    b"L" + b"9" * 1_000_000 + b"L\n.",
    *(b"\x80\x04" + opcode * 200_000 + b"." for opcode in (b"(", b"}", b"]")),
    b"\x80\x04)" + b"\x85" * 200_000 + b".",
    b"\x80\x04N" + b"\x94" * 200_000 + b".",
    b"\x80\x04}" + DOUBLED + b"Ns.",
    b"\x80\x04\x8f(" + DOUBLED + b"\x90.",
    b"\x80\x04}\x8c\x03ema" + DOUBLED + b"s.",
    b"\x80\x04" + DOUBLED + TEXT + b"\x93.",
    b"\x80\x04" + b"cnumpy\ndtype\n" + DOUBLED + b"\x85R.",
]


@pytest.mark.timeout(60)
def test_counts_and_repetitions_take_memory_as_the_file_has_bytes(tmp_path):
    for code in HUGE:
        tracemalloc.start()
        try:
            refused_bytes(tmp_path, code)
            assert tracemalloc.get_traced_memory()[1] < 2**20 + 250 * len(code), code[:20]
        finally:
            tracemalloc.stop()


def test_what_is_shared_too_often_is_refused(tmp_path):
    tensor = torch.ones(10_000)
    model = persistent("SongUNet", {f"p{i}": tensor for i in range(50)})
    assert "larger than the file" in refused(write(tmp_path / "a.pkl", network(modules={"model": model})[0]))
    # Each module is written once and named twice, which makes 2^20 paths.
    module = persistent("SongUNet")
    for _ in range(20):
        module = persistent("SongUNet", modules={"a": module, "b": module})
    refused(write(tmp_path / "a.pkl", network(modules={"model": module})[0]))


# Damaged and unsuitable files


def test_truncated_and_foreign_files_are_refused(benign, tmp_path):
    data = benign[0].read_bytes()
    for end in [*range(0, 200, 3), *range(200, len(data), 397), *range(len(data) - 40, len(data))]:
        assert "or a damaged one" in refused_bytes(tmp_path, data[:end])
    for content in (b"hello\n", b"\x00" * 50, b"PK\x03\x04" + b"\x00" * 30, b"<html></html>"):
        assert "is no pickle of an EDM network" in refused_bytes(tmp_path, content)


def test_damaged_files_end_in_one_line_or_are_read(benign, tmp_path):
    rng, data, path = random.Random(0), benign[0].read_bytes(), tmp_path / "damaged.pkl"
    messages = []
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_edm_pickle(path)
        except InputError as error:
            messages.append(str(error))
    assert 100 < len(messages) < 600
    assert all(message.isprintable() for message in messages)
    assert not (tmp_path / "marker").exists()


VP = "must be an EDMPrecond, got 'VPPrecond': other preconditionings, as in the published"
LEVELS = "sigma_min and sigma_max must be ascending noise levels"


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"G": 1, "D": 2}, "no network under 'ema', only 'D', 'G'"),
        ({"ema": None}, "'ema' must be a network, got NoneType"),
        (persistent("VPPrecond"), VP),
        (persistent("EDMPrecond"), "no submodule 'model'"),
        (network(modules={"model": 3})[0], "no submodule 'model'"),
        (network(modules={"model": persistent("DhariwalUNet")})[0], "model_type is 'SongUNet', the network a 'Dhari"),
        (network(modules={"model": persistent("SongUNet", {"a": 1})})[0], "model.a must be a tensor, got int"),
        (network(modules={"model": persistent("SongUNet", {"a.b": None})})[0], "model lacks its _parameters"),
        (network(modules={"model": persistent("SongUNet", args=(16,))})[0], "model has more than 0 positional"),
        (network(deep=persistent("Conv2d", _parameters=3))[0], "model.enc.16x16_conv lacks its _parameters"),
        (network(deep=3)[0], "model.enc.16x16_conv must be a module, got int"),
        (network(_init_kwargs=None)[0], "the network lacks its _init_kwargs"),
        (network(kwargs={"img_channels": torch.ones(1)})[0], "argument img_channels is not a plain value"),
        (network(kwargs={"sigma_min": -1})[0], LEVELS),
        (network(kwargs={"sigma_max": "80"})[0], LEVELS),
        (network(kwargs={"sigma_max": float("nan")})[0], LEVELS),
        (network(kwargs={"sigma_max": 0})[0], LEVELS),
    ],
)
def test_what_is_not_an_edm_network_is_refused(tmp_path, root, message):
    assert message in refused(write(tmp_path / "a.pkl", root))
