"""Reads published EDM pickles without running their code; hostile and damaged ones are refused with one line."""

import copyreg
import io
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys

import pytest
import torch
from torch import nn

from lit_knn.edm_checkpoint import convert, load_network_parts, main, read_converted, read_edm_pickle
from lit_knn.errors import InputError
from lit_knn.nets.published import inert_numpy, inert_objects
from tests.edm_pickles import CONFIG, Call, Global, module_that_records, network, persistent, published, write


def refused(path):
    """The one-line error of reading `path`; it names the file."""
    with pytest.raises(InputError) as caught:
        read_edm_pickle(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def assert_same(state_dict, expected):
    assert list(state_dict) == list(expected)
    for name, value in expected.items():
        assert state_dict[name].dtype == value.dtype
        assert torch.equal(state_dict[name], value), name


@pytest.fixture
def benign(tmp_path):
    ema, expected = network(tmp_path / "marker")
    return write(tmp_path / "edm.pkl", published(ema, tmp_path / "marker")), expected


# Benign files


@pytest.mark.parametrize("protocol", range(6))
def test_reads_names_values_and_configuration_of_every_protocol(tmp_path, protocol):
    ema, expected = network(tmp_path / "marker")
    path = write(tmp_path / "edm.pkl", published(ema, tmp_path / "marker"), protocol)
    config, state_dict = read_edm_pickle(path)
    assert config == CONFIG
    assert_same(state_dict, expected)
    assert all(value.is_contiguous() and not value.requires_grad for value in state_dict.values())


def test_runs_no_source_and_imports_nothing(benign, tmp_path):
    with module_that_records("torch_utils.persistence") as touched:
        read_edm_pickle(benign[0])
    assert not touched
    modules = set(sys.modules)
    read_edm_pickle(benign[0])
    assert set(sys.modules) == modules
    assert "torch_utils" not in sys.modules
    assert not (tmp_path / "marker").exists()


def test_the_network_itself_is_read_like_one_under_ema(tmp_path):
    ema, expected = network()
    assert_same(read_edm_pickle(write(tmp_path / "a.pkl", ema))[1], expected)


@pytest.mark.parametrize("count", range(9))
def test_positional_arguments_and_a_model_type_by_default(tmp_path, count):
    order = {"img_resolution": 16, "img_channels": 3, "label_dim": 10, "use_fp16": False, "sigma_min": 0}
    order |= {"sigma_max": float("inf"), "sigma_data": 0.5, "model_type": "SongUNet"}
    named = dict(list(order.items())[count:7])  # the last ones are named, unless all are positional
    ema, _ = network(args=tuple(order.values())[:count], kwargs={**named, "channel_mult": [1, 2]})
    assert read_edm_pickle(write(tmp_path / "a.pkl", ema))[0] == CONFIG


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_element_types_views_and_empty_tensors(tmp_path, dtype):
    whole = torch.arange(60).reshape(3, 4, 5).to(dtype)
    tensors = {"view": whole[1:, ::2, 1:].transpose(0, 2), "scalar": whole[2, 3, 4], "empty": whole[:0]}
    model = persistent("DhariwalUNet", buffers=tensors)
    ema, _ = network(modules={"model": model}, kwargs={"img_resolution": 8, "img_channels": 1})
    state_dict = read_edm_pickle(write(tmp_path / "a.pkl", ema))[1]
    assert_same(state_dict, {f"model.{name}": value for name, value in tensors.items()})
    assert state_dict["model.view"].untyped_storage().nbytes() == tensors["view"].nbytes


def test_values_saved_from_a_gpu_are_read_on_the_cpu(tmp_path):
    data = storage_bytes().replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    assert b"cuda:0" in data
    ema, _ = network(modules=tensor_module(rebuild(Call("torch.storage", "_load_from_bytes", data), 0, (3,), (1,))))
    assert_same(read_edm_pickle(write(tmp_path / "a.pkl", ema))[1], {"model.a": torch.arange(3.0)})


# Hostile files

COMMAND = "touch {marker}"
CALLS = [
    ("os", "system", COMMAND),
    ("posix", "system", COMMAND),
    ("builtins", "eval", "open({marker!r}, 'w')"),
    ("builtins", "exec", "open({marker!r}, 'w')"),
    ("__builtin__", "eval", "open({marker!r}, 'w')"),
    ("builtins", "open", "{marker}", "w"),
    ("builtins", "getattr", "", "__class__"),
    ("builtins", "__import__", "os"),
    ("builtins", "bytearray", 10**13),
    ("subprocess", "Popen", ["touch", "{marker}"]),
    ("importlib", "import_module", "torch_utils"),
    ("operator", "attrgetter", "__globals__"),
    ("functools", "partial", print),
    ("pickle", "loads", b"."),
    ("torch", "load", "{marker}"),
    ("torch.hub", "load", "x", "y"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_parameter.__globals__"),
    ("torch.storage", "UntypedStorage", 10**13),
    ("torch.nn.modules.module", "Module"),
    ("collections", "OrderedDict.fromkeys", "ab"),
    ("torch_utils.persistence", "other_function"),
    ("torch_utils.persistence", "import_hooks.append"),
    ("dnnlib.util", "call_func_by_name"),
    ("lit_knn.nets.published.inert_objects", "Function"),
    ("numpy", "load", "{marker}"),
    ("numpy", "fromfile", "{marker}"),
    ("numpy", "zeros", 10**13),
    ("numpy", "frombuffer", b""),
    ("numpy", "ndarray.tofile", "{marker}"),
    ("numpy", "dtype.__reduce__"),
    ("numpy", "vectorize", print),
    ("numpy", "float64", 1),
    ("numpy", "void", 10**13),
    ("numpy", "recarray"),
    ("numpy.core.multiarray", "scalar.__self__"),
    ("numpy.core.multiarray", "fromstring", b""),
    ("numpy._core.multiarray", "empty", 10**13),
    ("numpy.core.numeric", "fromfunction", print),
    ("numpy.core.records", "fromfile", "{marker}"),
    ("numpy._core._internal", "_convert_to_stringdtype_kwargs"),
    ("numpy.ma.core", "_mareconstruct"),
    ("numpy.random", "__generator_ctor"),
    ("numpy.testing._private.utils", "runstring", "open({marker!r}, 'w')"),
    ("numpy.core._multiarray_umath", "_reconstruct"),
]


def hostile_call(call, marker):
    module, name, *args = call
    args = [[a.format(marker=marker) if isinstance(a, str) else a for a in arg] if type(arg) is list else arg
            for arg in args]  # fmt: skip
    args = [arg.format(marker=marker) if isinstance(arg, str) else arg for arg in args]
    return Call(module, name, *[None if arg is print else arg for arg in args])


@pytest.mark.parametrize("place", ["root", "beside", "deep", "argument"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}.{call[1]}")
def test_a_global_outside_the_list_is_refused_by_name(tmp_path, call, place):
    marker = tmp_path / "marker"
    hostile = hostile_call(call, marker)
    root = {
        "root": lambda: hostile,
        "beside": lambda: {**published(network()[0]), "loss_fn": hostile},
        "deep": lambda: published(network(deep=hostile)[0]),
        "argument": lambda: published(network(kwargs={"img_resolution": hostile})[0]),
    }[place]()
    modules = set(sys.modules)
    message = refused(write(tmp_path / "a.pkl", root))
    assert f"the global {call[0]}.{call[1]}, which is refused" in message
    assert not marker.exists()
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


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("template", ["cos\nsystem\n(S'touch {}'\ntR.", "(S'touch {}'\nios\nsystem\n."])
def test_a_pickle_inside_the_values_of_a_tensor_is_refused(tmp_path, position, template):
    data = storage_bytes(position, template.format(tmp_path / "marker").encode())
    nested = Call("torch.storage", "_load_from_bytes", data)
    message = refused(write(tmp_path / "a.pkl", published(network(deep=nested)[0])))
    assert "the global os.system, which is refused" in message
    assert not (tmp_path / "marker").exists()


def test_values_of_a_tensor_in_the_zip_format_are_not_opened(tmp_path):
    torch.save({"a": Trap(tmp_path / "marker")}, tmp_path / "zip.pt")
    nested = Call("torch.storage", "_load_from_bytes", (tmp_path / "zip.pt").read_bytes())
    refused(write(tmp_path / "a.pkl", published(network(deep=nested)[0])))
    assert not (tmp_path / "marker").exists()


class Trap:
    """Pickled as `os.system`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    "code",
    [
        b"(S'touch {}'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch {}'\no.",  # OBJ
        b"cos\nsystem\n(S'touch {}'\ntR.",  # REDUCE
        b"\x80\x02csubprocess\nPopen\n(S'touch {}'\nt\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
    ],
)
def test_every_opcode_that_names_a_global_is_refused(tmp_path, code):
    path = tmp_path / "a.pkl"
    path.write_bytes(code.replace(b"{}", bytes(tmp_path / "marker")))
    assert "the global " + ("subprocess.Popen" if b"Popen" in code else "os.system") in refused(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
def test_registered_extensions_are_refused(tmp_path, monkeypatch, opcode):
    copyreg.add_extension("os", "system", 0xF0)
    monkeypatch.setitem(copyreg._extension_cache, 0xF0, os.system)
    try:
        path = tmp_path / "a.pkl"
        path.write_bytes(b"\x80\x02" + opcode + f"(S'touch {tmp_path / 'marker'}'\ntR.".encode())
        assert "opcode EXT" in refused(path)
    finally:
        copyreg.remove_extension("os", "system", 0xF0)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("code", [b"Pos.system\n.", b"\x80\x02\x8c\x01aQ.", b"\x80\x05\x97."])
def test_persistent_ids_and_outer_buffers_are_refused(tmp_path, code):
    (tmp_path / "a.pkl").write_bytes(code)
    assert "which is refused" in refused(tmp_path / "a.pkl")


RECONSTRUCT = b"ctorch_utils.persistence\n_reconstruct_persistent_obj\n"
RECORD, MAPPING = b"ctorch.nn.modules.linear\nLinear\n", b"ccollections\nOrderedDict\n"
ATTRIBUTE = b"(S'__setstate__'\nccollections\nOrderedDict\nd"


TARGETS = [RECONSTRUCT, RECORD, MAPPING, b"cbuiltins\nset\n", b"cbuiltins\nobject\n", b"cnumpy\nndarray\n"]
TARGETS += [b"cnumpy\ndtype\n", b"cnumpy\ndtype\n(S'f8'\ntR", b"cnumpy.core.multiarray\nscalar\n"]
TARGETS += [b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntc_codecs\nencode\n(Vb\nVlatin1\ntRtR"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("state", [ATTRIBUTE, b"(N" + ATTRIBUTE + b"t", b"(" + ATTRIBUTE + ATTRIBUTE + b"t"])
def test_nothing_allowed_can_be_given_attributes(tmp_path, target, state):
    kinds = [getattr(inert_objects, name) for name in ("Record", "InertDict", "Function", "Name")]
    kinds += [inert_numpy.ElementType, inert_numpy.ArrayRecord]
    before = [dict(vars(kind)) for kind in kinds]
    (tmp_path / "a.pkl").write_bytes(target + state + b"b.")
    refused(tmp_path / "a.pkl")
    assert before == [dict(vars(kind)) for kind in kinds]


def test_a_dict_with_methods_of_its_own_and_a_record_with_setstate_stay_inert(tmp_path):
    parameters = Call("collections", "OrderedDict", {"a": torch.ones(2)}, state={"items": Global("builtins", "set")})
    model = Call(
        "torch_utils.persistence",
        "_reconstruct_persistent_obj",
        {"type": "class", "class_name": "SongUNet", "state": {}},
        state={"_parameters": parameters, "_buffers": {}, "_modules": {}, "_init_kwargs": {}, "__setstate__": 1,
               "__class__": Global("builtins", "set")},
    )  # fmt: skip
    ema, _ = network(modules={"model": model})
    assert_same(read_edm_pickle(write(tmp_path / "a.pkl", ema))[1], {"model.a": torch.ones(2)})


def test_a_global_cannot_put_control_characters_on_the_terminal(tmp_path):
    message = refused(write(tmp_path / "a.pkl", Call("os\n\x1b[2J", "system")))
    assert message.isprintable()


# Small files that ask for much memory


def rebuild(storage, offset, size, stride):
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, size, stride, False, {})


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (2**40,), (0,)), (0, (4,), (1,)), (2, (2,), (1,)), (-1, (1,), (1,)), (0, (2, 2), (2,)), (0, (2,), (-1,)),
     (0, (1,) * 1000, (1,) * 1000), (0, (0.5,), (1,)), (2**70, (1,), (1,)), (0, (2,), (2**70,))],
)  # fmt: skip
def test_a_tensor_larger_than_its_storage_is_refused(tmp_path, offset, size, stride):
    storage = Call("torch.storage", "_load_from_bytes", storage_bytes())
    good = write(tmp_path / "good.pkl", network(modules=tensor_module(rebuild(storage, 0, (3,), (1,))))[0])
    assert read_edm_pickle(good)[1]["model.a"].tolist() == [0, 1, 2]
    bad = network(modules=tensor_module(rebuild(storage, offset, size, stride)))[0]
    assert "rebuilds a tensor" in refused(write(tmp_path / "a.pkl", bad))


def tensor_module(tensor):
    return {"model": persistent("SongUNet", {"a": tensor})}


def test_a_storage_that_claims_more_values_than_it_has_is_refused(tmp_path):
    data = storage_bytes()
    for damaged in (data[:-1], data + b"\0", data[:-20] + struct.pack("<q", 2**40) + data[-12:]):
        storage = Call("torch.storage", "_load_from_bytes", damaged)
        ema, _ = network(modules=tensor_module(rebuild(storage, 0, (1,), (1,))))
        assert "too many or too few values" in refused(write(tmp_path / "a.pkl", ema))


@pytest.mark.parametrize("code", [b"\x80\x02Nr\xff\xff\xff\x7f.", b"Np99999999999\n.", b"\x80\x04\x8e" + b"\xff" * 7])
def test_counts_that_allocate_are_refused(tmp_path, code):
    (tmp_path / "a.pkl").write_bytes(code)
    refused(tmp_path / "a.pkl")


def test_modules_that_hold_each_other_end(tmp_path):
    # Each module is written once and named twice through the memo, which makes 2^20 paths.
    shared = b"".join([shared_pair(20), b"."])
    (tmp_path / "a.pkl").write_bytes(shared)
    assert "more than" in refused(tmp_path / "a.pkl")


def shared_pair(depth):
    """The pickle of a network in which each module contains the next one twice."""
    leaf = pickle_of_state("SongUNet", b"}")
    for level in range(depth):
        memo = str(level).encode()
        children = b"(S'model'\n" + leaf + b"p" + memo + b"\nS'b'\ng" + memo + b"\nd"
        leaf = pickle_of_state("EDMPrecond" if level == depth - 1 else "SongUNet", children)
    return leaf


def pickle_of_state(class_name, children):
    kwargs = b"(S'img_resolution'\nI8\nS'img_channels'\nI3\nd"
    state = b"(S'_parameters'\n}S'_buffers'\n}S'_init_kwargs'\n" + kwargs + b"S'_modules'\n" + children + b"d"
    meta = b"(S'type'\nS'class'\nS'class_name'\nS'" + class_name.encode() + b"'\nS'state'\n" + state + b"d"
    return RECONSTRUCT + b"(" + meta + b"tR"


def test_arguments_that_grow_when_copied_are_refused(tmp_path):
    value, cycle = [1], []
    for _ in range(40):
        value = [value, value]
    cycle.append(cycle)
    for growing in (value, cycle, [0] * 10_000, 10**5000):
        ema, _ = network(kwargs={"img_resolution": 8, "img_channels": 3, "label_dim": growing})
        assert "label_dim" in refused(write(tmp_path / "a.pkl", ema))


def test_tensors_that_share_one_storage_too_often_are_refused(tmp_path):
    tensor = torch.ones(10_000)
    model = persistent("SongUNet", {f"p{i}": tensor for i in range(50)})
    assert "larger than the file" in refused(write(tmp_path / "a.pkl", network(modules={"model": model})[0]))


# Damaged and unsuitable files


def test_truncated_files_are_refused_wherever_they_end(benign, tmp_path):
    data = benign[0].read_bytes()
    path = tmp_path / "cut.pkl"
    for end in [*range(200), *range(200, len(data), 97), *range(len(data) - 60, len(data))]:
        path.write_bytes(data[:end])
        message = refused(path)
        if end > 2:
            assert "truncated" in message


def test_damaged_files_end_in_one_line_or_are_read(benign, tmp_path):
    rng, data, path = random.Random(0), benign[0].read_bytes(), tmp_path / "damaged.pkl"
    messages = []
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_edm_pickle(path)
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00" * 50, b"PK\x03\x04" + b"\x00" * 30, b"<html></html>"])
def test_what_is_no_pickle_is_refused(tmp_path, content):
    (tmp_path / "a.pkl").write_bytes(content)
    assert ("is not a pickle" if content else "is empty") in refused(tmp_path / "a.pkl")


def test_missing_files_and_folders_are_refused(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "none.pkl")
    assert "is no file, but a folder" in refused(tmp_path)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"G": 1, "D": 2}, "no network under 'ema', only 'D', 'G'"),
        ({}, "only nothing"),
        ({"ema": None}, "'ema' must be a network, got NoneType"),
        ([1, 2], "'ema' must be a network, got list"),
        (
            persistent("VPPrecond"),
            "must be an EDMPrecond, got 'VPPrecond': other preconditionings, as in the published",
        ),
        (persistent("VEPrecond"), "must be an EDMPrecond, got 'VEPrecond'"),
        (persistent("iDDPMPrecond"), "must be an EDMPrecond, got 'iDDPMPrecond'"),
        (persistent("EDMPrecond"), "no submodule 'model'"),
        (network(modules={"model": 3})[0], "no submodule 'model'"),
        (network(modules={"model": persistent("SongUNet")})[0], "has no parameters"),
        (network(modules={"model": persistent("DhariwalUNet")})[0], "model_type is 'SongUNet', the network a 'Dhari"),
        (network(modules={"model": persistent("SongUNet", {"a": 1})})[0], "model.a must be a tensor, got int"),
        (network(modules={"model": persistent("SongUNet", {"a.b": None})})[0], "model has parameters of an impossible"),
        (network(modules={"model": persistent("SongUNet", _parameters=None)})[0], "model lacks its parameters"),
        (network(modules={"model": persistent("SongUNet", args=(16,))})[0], "1 positional constructor arguments"),
        (network(deep=persistent("Conv2d", _parameters=3))[0], "model.enc.16x16_conv lacks its parameters"),
        (network(_init_kwargs=None)[0], "the network lacks its constructor arguments"),
        (network(kwargs={"img_channels": 0})[0], "img_channels must be an integer of at least 1, got 0"),
        (network(kwargs={"img_channels": torch.ones(1)})[0], "argument img_channels is not a plain value"),
        (network(kwargs={"img_channels": 3, "model_type": 1})[0], "model_type must be the name of a network, got 1"),
    ],
)
def test_what_is_not_an_edm_network_is_refused(tmp_path, root, message):
    assert message in refused(write(tmp_path / "a.pkl", root))


# Conversion


def test_conversion_keeps_every_bit(benign, tmp_path):
    path, expected = benign
    out = tmp_path / "out.safetensors"
    assert convert(path, out)[0] == CONFIG
    config, state_dict = read_converted(out)
    assert config == CONFIG
    assert_same({name: state_dict[name] for name in expected}, expected)
    assert len(state_dict) == len(expected)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["edm.pkl", "out.safetensors"]


def test_conversion_replaces_nothing_and_leaves_nothing_behind(benign, tmp_path, monkeypatch):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        convert(benign[0], out)
    assert out.read_bytes() == b"mine"
    with pytest.raises(InputError, match="no such folder"):
        convert(benign[0], tmp_path / "none" / "out.safetensors")
    with pytest.raises(InputError, match=r"must be named \.safetensors"):
        convert(benign[0], tmp_path / "out.pt")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(InputError, match=r"cannot be written.*No space left"):
        convert(benign[0], tmp_path / "other.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["edm.pkl", "out.safetensors"]


def test_damaged_or_foreign_converted_files_are_refused(benign, tmp_path):
    from safetensors.torch import save_file

    out, bad = tmp_path / "out.safetensors", tmp_path / "bad.safetensors"
    convert(benign[0], out)
    for end in (0, 5, 100, out.stat().st_size - 1):
        bad.write_bytes(out.read_bytes()[:end])
        with pytest.raises(InputError, match="damaged"):
            read_converted(bad)
    for metadata, message in [
        (None, "not a converted"),
        ({"format": "lit_knn.edm_network"}, "holds no configuration"),
        ({"format": "lit_knn.edm_network", "config": "[" * 100_000}, "holds no configuration"),
        ({"format": "lit_knn.edm_network", "config": "[]"}, "must be a dict"),
        ({"format": "lit_knn.edm_network", "config": "{}"}, "model_type must be"),
    ]:
        save_file({"a": torch.ones(1)}, bad, metadata=metadata)
        with pytest.raises(InputError, match=message):
            read_converted(bad)
    with pytest.raises(InputError, match="no such file"):
        read_converted(tmp_path / "none.safetensors")


def test_the_command_says_what_it_found(benign, tmp_path):
    command = [sys.executable, "-m", "lit_knn.edm_checkpoint", str(benign[0]), str(tmp_path / "out.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "SongUNet, 16x16 images of 3 channels, 10 classes, 133 parameters" in result.stdout
    assert not result.stderr


def test_bad_input_to_the_command_is_one_line_and_status_2(tmp_path, capsys):
    path = write(tmp_path / "a.pkl", Call("os", "system", f"touch {tmp_path / 'marker'}"))
    with pytest.raises(SystemExit) as stopped:
        main([str(path), str(tmp_path / "out.safetensors")])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {path} names the global os.system, which is refused")
    assert output.err.count("\n") == 1
    assert not output.out
    assert [file.name for file in tmp_path.iterdir()] == ["a.pkl"]


# Any file


def own_checkpoint(path, **changes):
    """The file that LitEDM's training writes: `state_dict` has the averaged weights, another part the current ones."""
    checkpoint = {
        "state_dict": {"denoiser.model.a": torch.ones(2), "other": torch.zeros(1)},
        "current_model_state": {"denoiser.model.a": torch.zeros(2)},
        "hyper_parameters": {"sigma_data": 0.4, "sigma_min": 0.002, "sigma_max": 80.0, "lr": 1e-3},
        "network_config": {"model_type": "SongUNet", "img_resolution": 8, "img_channels": 1},
    }
    torch.save({**checkpoint, **changes}, path)
    return path


def test_network_parts_of_every_kind_of_file(benign, tmp_path):
    path, expected = benign
    convert(path, tmp_path / "out.safetensors")
    for file in (path, tmp_path / "out.safetensors"):
        config, state_dict = load_network_parts(file)
        assert config == CONFIG
        assert state_dict.keys() == expected.keys()
    config, state_dict = load_network_parts(own_checkpoint(tmp_path / "own.ckpt"))
    assert_same(state_dict, {"model.a": torch.ones(2)})
    assert config == {
        "model_type": "SongUNet", "img_resolution": 8, "img_channels": 1, "label_dim": 0,
        "sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.4,
    }  # fmt: skip


def test_an_own_network_of_another_kind_has_noise_levels_alone(tmp_path):
    config, _ = load_network_parts(own_checkpoint(tmp_path / "own.ckpt", network_config={}))
    assert config == {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.4}


def test_unsuitable_own_checkpoints_are_refused(tmp_path):
    path = tmp_path / "own.ckpt"
    for changes, message in [
        ({"state_dict": {"consistency_function.net.a": torch.ones(1)}}, "not a checkpoint of LitEDM"),
        ({"state_dict": None}, "no state_dict"),
        ({"hyper_parameters": 3}, "must be dicts"),
        ({"extra": Trap(tmp_path / "marker")}, "names the global posix.system, which is refused"),
    ]:
        with pytest.raises(InputError, match=message):
            load_network_parts(own_checkpoint(path, **changes))
    assert not (tmp_path / "marker").exists()
    path.write_bytes(own_checkpoint(path).read_bytes()[:300])
    with pytest.raises(InputError, match="is damaged"):
        load_network_parts(path)
    with pytest.raises(InputError, match="no such file"):
        load_network_parts(tmp_path / "none.ckpt")
    with pytest.raises(InputError, match=r"must be one of \.pkl, \.safetensors, \.ckpt"):
        load_network_parts(tmp_path / "a.pt")


def test_the_state_dict_loads_strictly_into_modules_of_the_same_names(benign):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Module()
            self.model.mixed = nn.Parameter(torch.zeros(2, 6, dtype=torch.float16))
            self.model.register_buffer("freqs", torch.zeros(5))
            conv = nn.Conv2d(3, 4, 3)
            conv.register_buffer("resample_filter", torch.zeros(1, 1, 2, 2))
            self.model.enc = nn.ModuleDict({"16x16_conv": conv, "16x16_linear": nn.Linear(2, 3)})

    outer = Outer()
    outer.load_state_dict(read_edm_pickle(benign[0])[1], strict=True)
    assert torch.equal(outer.model.mixed, benign[1]["model.mixed"])
