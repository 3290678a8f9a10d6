"""Reads NumPy's numbers and arrays as plain values; other NumPy objects and hostile counts are refused."""

import json
import pickle
import tracemalloc

import numpy as np
import pytest

from lit_knn.edm_checkpoint import convert, read_converted, read_edm_pickle
from lit_knn.errors import InputError
from lit_knn.nets.published.inert_numpy import ArrayRecord
from lit_knn.nets.published.inert_pickle import load_inert
from tests.edm_pickles import NUMPY_1, NUMPY_2, Call, Global, network, persistent, write

TYPES = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TYPES += [np.float16, np.float32, np.float64]
EVERY_WRITER = [pytest.param(p, core, id=f"{p}-{core}") for p in range(6) for core in (NUMPY_1, NUMPY_2)]
BYTES_8 = np.float64(0.5).tobytes()


def refused(path):
    """The one-line error of reading `path`."""
    with pytest.raises(InputError) as caught:
        load_inert(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def extremes(kind):
    if kind is np.bool_:
        return [True, False]
    if issubclass(kind, np.integer):
        return [np.iinfo(kind).min, -1 if np.iinfo(kind).min else 1, np.iinfo(kind).max]
    return [np.finfo(kind).smallest_subnormal, -0.0, 1 / 3, np.finfo(kind).max, np.inf]


def same(found, expected):
    """Whether two nested values are equal and have the same plain types."""
    if isinstance(expected, list):
        return type(found) is list and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize(("protocol", "core"), EVERY_WRITER)
def test_scalars_of_every_type_become_the_numbers_that_numpy_says(tmp_path, protocol, core):
    scalars = [kind(value) for kind in TYPES for value in extremes(kind)]
    found = load_inert(write(tmp_path / "a.pkl", scalars, protocol, core))
    assert same(found, [scalar.item() for scalar in scalars])
    assert {type(value) for value in found} == {bool, int, float}


@pytest.mark.parametrize(("protocol", "core"), EVERY_WRITER)
@pytest.mark.parametrize("kind", [np.bool_, np.int16, np.uint8, np.float32, ">f8", ">i2"])
def test_arrays_of_every_layout_become_the_lists_that_numpy_says(tmp_path, protocol, core, kind):
    cube = np.arange(24).reshape(2, 3, 4).astype(kind)
    fixed = cube.copy()
    fixed.flags.writeable = False
    arrays = [cube, np.asfortranarray(cube), cube.transpose(1, 0, 2), cube[::-1, 1:, ::2], fixed, cube[0, 0, :1]]
    arrays += [cube[1, 2, 3:].reshape(()), cube[:0], cube[:, :0]]
    for array in arrays:
        record = load_inert(write(tmp_path / "a.pkl", array, protocol, core))
        assert type(record) is ArrayRecord
        assert same(record.tolist(), array.tolist())


def test_the_writer_of_these_tests_names_what_numpy_names(tmp_path):
    # With the installed NumPy's names, the bytes are the same as pickle's own.
    core = np.array(0).__reduce__()[0].__module__.removesuffix(".multiarray")
    for protocol in range(6):
        thing = [np.float64(0.5), np.arange(6.0).reshape(2, 3), np.bool_(True)]
        assert write(tmp_path / "a.pkl", thing, protocol, core).read_bytes() == pickle._dumps(thing, protocol)


@pytest.mark.parametrize(("protocol", "core"), EVERY_WRITER)
def test_numpy_in_the_configuration_is_plain_and_survives_conversion(tmp_path, protocol, core):
    kwargs = {
        "img_resolution": np.int64(16),
        "img_channels": np.uint8(3),
        "label_dim": np.array(10),
        "a": np.float16(0.5),
    }
    kwargs |= {"use_fp16": np.bool_(True), "channel_mult": np.array([1, 2]), "table": {"x": [np.array([[1.5], [2.5]])]}}
    path = write(tmp_path / "a.pkl", network(kwargs=kwargs, sigma_data=np.float32(0.5))[0], protocol, core)
    config, _ = convert(path, tmp_path / "out.safetensors")
    expected = {"img_resolution": 16, "img_channels": 3, "label_dim": 10, "a": 0.5, "use_fp16": True}
    expected |= {"channel_mult": [1, 2], "table": {"x": [[[1.5], [2.5]]]}, "sigma_data": 0.5}
    assert {name: config[name] for name in expected} == expected
    assert all(same(config[name], value) for name, value in expected.items() if not isinstance(value, dict))
    assert json.loads(json.dumps(config)) == config == read_converted(tmp_path / "out.safetensors")[0]


# Refused input


class Trap:
    """Writes a file if a real unpickler loads it."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.zeros(2, "U3"), "U3"),
        (np.str_("abc"), "U3"),
        (np.bytes_(b"abc"), "S3"),
        (np.zeros(2, "M8[s]"), "M8"),
        (np.timedelta64(3, "s"), "m8"),
        (np.complex128(1j), "c16"),
        (np.zeros(2, [("a", "f4"), ("b", "O")]), "V12"),
        (np.zeros(2, [("a", "f4")])[0], "V4"),
        (np.void(b"abc"), "V3"),
        (np.zeros(2, "3f4,2i8"), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_other_element_types_are_refused_by_name(tmp_path, value, code, protocol):
    message = refused(write(tmp_path / "a.pkl", {"a": value}, protocol))
    assert f"NumPy type {code or 'V'}" in message


@pytest.mark.parametrize("protocol", range(6))
def test_an_array_of_objects_is_refused_and_its_objects_are_not_made(tmp_path, protocol):
    array = np.array([Trap(tmp_path / "marker"), None], dtype=object)
    message = refused(write(tmp_path / "a.pkl", array, protocol))
    assert "NumPy type O8" in message or "global io.open" in message or "global __builtin__.open" in message
    assert not (tmp_path / "marker").exists()
    array = np.array([{"a": 1}, None], dtype=object)
    assert "NumPy type O8" in refused(write(tmp_path / "a.pkl", array, protocol))


def dtype(code="f8", state=(3, "<", None, None, None, -1, -1, 0)):
    return Call("numpy", "dtype", code, False, True, state=state)


NESTED = dtype()
NESTED.args = (dtype(), False, True)
FIELDS = {"a": (dtype(), 0)}


@pytest.mark.parametrize(
    "hostile",
    [
        *(dtype(code) for code in ("O", "O8", "|O", "object", "f16", "f8,f8", "(2,)f8", "V8", "", "f" * 9999, 8, None)),
        *(dtype(code) for code in ([("a", "f8")], {"names": ["a"], "formats": ["O"]}, b"f8", ("f8", 3), NESTED)),
        *(
            dtype(state=state)
            for state in (
                (3, "|", None, None, None, -1, -1, 0),
                (3, "=", None, None, None, -1, -1, 0),
                (3, "<", None, None, None, -1, -1, 63),
                (3, "<", None, None, None, 8, 8, 0),
                (3, "<", (dtype(), (2**40,)), None, None, -1, -1, 0),
                (3, "<", None, ("a",), FIELDS, 8, 1, 16),
                (4, "<", None, None, None, -1, -1, 0, {"a": 1}),
                (3, "<"),
                (3, NESTED, None, None, None, -1, -1, 0),
                {"byte_order": "<"},
                [3, "<", None, None, None, -1, -1, 0],
                (None, {"code": "O8"}),
                "<",
            )
        ),
        Call("numpy", "dtype"),
    ],
)
def test_a_type_that_is_not_plain_is_refused(tmp_path, hostile):
    write(tmp_path / "good.pkl", Call("numpy.core.multiarray", "scalar", dtype(), BYTES_8))
    assert load_inert(tmp_path / "good.pkl") == 0.5
    refused(write(tmp_path / "a.pkl", Call("numpy.core.multiarray", "scalar", hostile, BYTES_8)))
    refused(write(tmp_path / "a.pkl", Call("numpy.core.numeric", "_frombuffer", BYTES_8, hostile, (1,), "C")))


def test_the_byte_order_of_a_type_is_set_once(tmp_path):
    state = b"(I3\nV%b\nNNNI-1\nI-1\nI0\ntb"
    code = b"cnumpy\ndtype\n(Vf8\nI00\nI01\ntR" + state % b"<"
    (tmp_path / "good.pkl").write_bytes(code + b".")
    load_inert(tmp_path / "good.pkl")
    (tmp_path / "a.pkl").write_bytes(code + state % b">" + b".")
    assert "more of the NumPy type f8 than its byte order" in refused(tmp_path / "a.pkl")


@pytest.mark.parametrize(
    "args",
    [
        (dtype(), b""),
        (dtype(), BYTES_8[:-1]),
        (dtype(), BYTES_8 * 2),
        (dtype(), "12345678"),
        (dtype(), bytearray(8)),
        (dtype(), 0.5),
        (dtype(),),
        (dtype(), BYTES_8, 1),
        ("f8", BYTES_8),
        (Global("numpy", "dtype"), BYTES_8),
        (Global("numpy", "ndarray"), BYTES_8),
        (dtype(state=None), BYTES_8),
        (dtype("i1"), b"1"),
        (dtype(), Call("os", "system", "true")),
    ],
)
def test_scalars_of_a_wrong_length_or_without_a_type_are_refused(tmp_path, args):
    refused(write(tmp_path / "a.pkl", Call("numpy.core.multiarray", "scalar", *args)))


def array(state, kind=None, shape=(0,), code=b"b"):
    return Call("numpy.core.multiarray", "_reconstruct", kind or Global("numpy", "ndarray"), shape, code, state=state)


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ((2**40,), BYTES_8), ((2**47, 2**47), b""), ((2**60,), b""), ((0, 2**60), b""), ((10**400,), BYTES_8),
        ((-1,), BYTES_8), ((-1, -1), BYTES_8), ((1.0,), BYTES_8), ((True,), BYTES_8), (((1,),), BYTES_8),
        ((1,) * 17, BYTES_8), ([1], BYTES_8), (1, BYTES_8), (None, BYTES_8),
        ((1,), b""), ((1,), BYTES_8[:-1]), ((), b""), ((2,), BYTES_8), ((1,), [0.5]), ((1,), "12345678"),
    ],
)  # fmt: skip
def test_arrays_whose_values_do_not_fill_their_shape_are_refused(tmp_path, shape, values):
    assert load_inert(write(tmp_path / "good.pkl", array((1, (1,), dtype(), False, BYTES_8)))).tolist() == [0.5]
    refused(write(tmp_path / "a.pkl", array((1, shape, dtype(), False, values))))
    for buffer in (values, bytearray(values) if isinstance(values, bytes) else values):
        refused(write(tmp_path / "a.pkl", Call("numpy.core.numeric", "_frombuffer", buffer, dtype(), shape, "C"), 5))


STATE = (1, (1,), dtype(), False, BYTES_8)


@pytest.mark.parametrize(
    "hostile",
    [
        array((2, *STATE[1:])),
        array(STATE[1:]),
        array((*STATE, 0)),
        array((1, (1,), dtype(), 1, BYTES_8)),
        array((1, (1,), "f8", False, BYTES_8)),
        array((1, (1,), dtype(state=None), False, BYTES_8)),
        array({"values": BYTES_8}),
        array((None, {"shape": (9,)})),
        array(STATE, Global("collections", "OrderedDict")),
        array(STATE, Global("torch.nn.modules.linear", "Linear")),
        array(STATE, Global("numpy.core.multiarray", "scalar")),
        array(STATE, shape=(10**12,)),
        array(STATE, code=b"O"),
        array(STATE, code="b"),
        *(Call("numpy.core.numeric", "_frombuffer", BYTES_8, dtype(), (1,), *order) for order in (
            (), ("A",), ("K",), (None,), ("C", (0,)), ("K", (1,)), ("K", (0, 0)), ("K", [0]), ("K", (0,), 1)
        )),
    ],
)  # fmt: skip
def test_arrays_in_another_format_are_refused(tmp_path, hostile):
    refused(write(tmp_path / "a.pkl", hostile))


def test_the_state_of_an_array_is_set_once(tmp_path):
    # A second state could replace the values that were checked.
    twice = Call("numpy.core.numeric", "_frombuffer", BYTES_8, dtype(), (1,), "C", state=STATE)
    assert "twice" in refused(write(tmp_path / "a.pkl", twice))


def test_values_cannot_be_resized_behind_an_array(tmp_path):
    buffer = bytearray(BYTES_8)
    path = write(tmp_path / "a.pkl", [buffer, Call("numpy.core.numeric", "_frombuffer", buffer, dtype(), (1,), "C")], 5)
    assert load_inert(path)[1].tolist() == [0.5]
    # The pickle appends to the list's first item after an array was made from it.
    position = path.read_bytes().index(b"\x96" + b"\x08" + bytes(7)) + 17
    assert path.read_bytes()[position : position + 1] == pickle.MEMOIZE
    number = path.read_bytes()[:position].count(pickle.MEMOIZE)
    path.write_bytes(path.read_bytes()[:-1] + b"0" + pickle.BINGET + bytes([number]) + b"(K\x01K\x02e.")
    refused(path)


def test_naming_the_same_values_again_and_again_takes_no_memory(tmp_path):
    values = bytes(2**20)
    kind = dtype("u1", (3, "|", None, None, None, -1, -1, 0))
    again = [Call("numpy.core.numeric", "_frombuffer", values, kind, (2**20,), "C") for _ in range(500)]
    path = write(tmp_path / "a.pkl", again)
    assert path.stat().st_size < 2**21
    tracemalloc.start()
    try:
        assert len(load_inert(path)) == 500
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(10_000,), (2**47, 0), (0, 2**47), (50, 50, 50, 0), (1,) * 16])
def test_arrays_that_grow_as_lists_are_refused_in_the_configuration(tmp_path, shape):
    values = bytes(8 * int(np.prod(shape, dtype=object)))
    large = Call("numpy.core.numeric", "_frombuffer", values, dtype(), shape, "C")
    kwargs = {"img_resolution": 8, "img_channels": 3, "label_dim": large}
    path = write(tmp_path / "a.pkl", network(kwargs=kwargs)[0])
    with pytest.raises(InputError, match="label_dim holds too many values"):
        read_edm_pickle(path)


def test_an_array_is_no_parameter(tmp_path):
    ema, _ = network(modules={"model": persistent("SongUNet", {"a": np.ones(3)})})
    with pytest.raises(InputError, match=r"model\.a must be a tensor, got ArrayRecord"):
        read_edm_pickle(write(tmp_path / "a.pkl", ema))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_damaged_numpy_pickles_end_in_one_line_or_are_read(tmp_path, protocol):
    thing = [np.float64(0.5), np.arange(6.0).reshape(2, 3), np.bool_(True), np.arange(6).reshape(2, 3).T]
    data, path, rng = (
        write(tmp_path / "a.pkl", thing, protocol).read_bytes(),
        tmp_path / "b.pkl",
        np.random.default_rng(0),
    )
    messages = []
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            found = load_inert(path)
        except InputError as error:
            messages.append(str(error))
        else:
            for item in found if isinstance(found, list) else []:
                if isinstance(item, ArrayRecord):
                    item.tolist()
    assert 100 < len(messages) < 600
    assert not any("\n" in message for message in messages)


# Frames, where Python's unpickler may read other opcodes than those that were checked


def framed(length, body):
    return b"\x80\x04\x95" + length.to_bytes(8, "little") + body


def test_a_frame_that_does_not_end_between_two_opcodes_is_refused(tmp_path):
    path = tmp_path / "a.pkl"
    # The list [5], whose memo index takes 4 bytes.
    body = b"]r\x00\x00\x00\x00K\x05a."
    path.write_bytes(framed(len(body), body))
    assert load_inert(path) == [5]
    for length in (2, 3, 4, 5, 7, len(body) - 1, len(body) + 1):
        path.write_bytes(framed(length, body))
        if length in (6, 8, len(body) - 1):
            continue
        refused(path)
    # A frame may end after any opcode, and the rest may have no frame.
    path.write_bytes(framed(6, body))
    assert load_inert(path) == [5]


def test_a_frame_within_a_frame_is_refused(tmp_path):
    body = b"]\x95" + (3).to_bytes(8, "little") + b"K\x05a."
    path = tmp_path / "a.pkl"
    path.write_bytes(framed(len(body), body))
    assert "frame within a frame" in refused(path)
