"""Search in PyTorch against distances enumerated in float64, and float32 products in full precision."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_knn.common import memory
from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, SubspaceKNN, Wiener
from lit_knn.index import FaissIndex, FlatIndex, SubspaceIndex, TorchIndex
from lit_knn.index.precision import full_float32, is_native, whole_tiles
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, pixels
from tests.toys import noisy as with_noise

CPU = torch.device("cpu")
TYPES = ["float32", *(["bfloat16"] if is_native(torch.bfloat16, CPU) else [])]


def exhaustive(reference, z, k):
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    return torch.cdist(z.flatten(1).double(), x).square().topk(k, dim=1, largest=False)


def noisy(reference, t, rows=20):
    return with_noise(reference.gather(torch.arange(rows)), t)


@pytest.mark.parametrize("compute", TYPES)
@pytest.mark.parametrize(("t", "hflip"), [(0.01, False), (0.5, False), (5.0, False), (0.5, True)])
def test_finds_the_nearest_of_pictures(compute, hflip, t):
    reference = ReferenceSet(pixels(), index=TorchIndex(compute), hflip=hflip)
    z, k = noisy(reference, t), 12
    sq_dist, ids = reference.search(z, k)
    expected, nearest = exhaustive(reference, z, k)
    recall = (ids.unsqueeze(2) == nearest.unsqueeze(1)).any(2).double().mean()
    assert recall > (0.999 if compute == "float32" else 0.9)
    assert (sq_dist.diff(dim=1) >= 0).all()
    # Rounding the query changes a distance by at most a few per cent of the distances' spread.
    found = (reference.gather(ids) - z.unsqueeze(1)).double().flatten(2).square().sum(2)
    assert ((sq_dist - found).abs() / found.mean()).max() < {"float32": 1e-5, "bfloat16": 0.05}[
        compute
    ]
    assert (found.sort(1).values / expected).max() < 1.1


def test_chunks_of_many_rows_are_whole_tiles_of_a_gpu():
    assert [whole_tiles(rows) for rows in (0, 1, 63, 64, 21_845)] == [1, 1, 63, 64, 21_824]


def test_chunks_make_no_difference(monkeypatch):
    monkeypatch.setattr(memory, "WORK_BYTES", 4 * 20 * 64)  # 64 rows for 20 latents
    reference = ReferenceSet(pixels(), index=TorchIndex("float32"))
    z = noisy(reference, 0.5)
    for k in (7, 200):
        sq_dist, ids = reference.search(z, k)
        expected, nearest = exhaustive(reference, z, k)
        assert torch.equal(ids, nearest)
        torch.testing.assert_close(sq_dist.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["pixels", "latents", "one latent"])
def test_8_bit_codes_keep_pixels_and_half_a_step_of_floats(kind):
    # The largest are below 0.
    latents = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)) * 3 - 4
    if kind == "one latent":  # All other values are pixels, also those after it.
        latents = torch.cat([torch.full((1, 8), 0.3), torch.full((299, 8), 1 / 255)])
    reference = ReferenceSet(pixels() if kind == "pixels" else latents, TorchIndex("float32"))
    assert reference.index.memory(300, reference.d) == {"index": 300 * (reference.d + 4)}
    z = noisy(reference, 0.5)
    sq_dist, ids = reference.search(z, 300)
    true = (reference.gather(ids) - z.unsqueeze(1)).double().flatten(2).norm(dim=2)
    half_a_step = 1e-6 if kind == "pixels" else latents.abs().max() / 127 / 2
    assert (sq_dist.double().sqrt() - true).abs().max() <= half_a_step * reference.d**0.5 * 1.001


@pytest.mark.parametrize(
    "index", [TorchIndex("float32"), FlatIndex(), SubspaceIndex(4, "float32")], ids=type
)
def test_a_moved_index_searches_on_its_new_device(index):
    reference, meta = ReferenceSet(pixels(N=50), index), torch.device("meta")
    reference.build_index()
    index.to(meta)
    found = index.search(torch.empty(2, reference.d, device=meta), 3)
    assert [(part.device, tuple(part.shape)) for part in found] == [(meta, (2, 3))] * 2


@pytest.mark.parametrize(("generation", "native"), [(7, False), (8, True)])
def test_types_that_a_gpu_multiplies_depend_on_its_generation(generation, native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 5))
    assert is_native(torch.bfloat16, torch.device("cuda")) == native
    assert is_native(torch.float32, torch.device("cuda"))


def test_a_cpu_tells_near_images_apart_by_default(monkeypatch):
    # Its bfloat16 products would round their sums to 8 bits, on processors that have them.
    monkeypatch.setattr("lit_knn.index.precision.is_native", lambda *_: True)
    frames = pixels(N=1).repeat(40, 1, 1, 1)
    frames.flatten(1)[torch.arange(40), torch.arange(40)] ^= 8
    for index in (TorchIndex(), SubspaceIndex(39)):
        reference = ReferenceSet(frames, index)
        z = reference.gather(torch.arange(40)).requires_grad_()  # as for guidance
        assert reference.search(z, 1)[1][:, 0].tolist() == list(range(40))


def test_the_flat_index_and_all_components_find_what_faiss_finds():
    x = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    z = noisy(ReferenceSet(x), 0.5)
    expected, nearest = ReferenceSet(x, FaissIndex("Flat")).search(z, 40)
    for index in (FlatIndex(), SubspaceIndex(20, "float32")):
        sq_dist, ids = ReferenceSet(x, index).search(z, 40)
        assert torch.equal(ids, nearest)
        torch.testing.assert_close(sq_dist, expected, rtol=1e-5, atol=1e-4)
    assert ReferenceSet(x, FlatIndex()).search(x, 1)[0].min() >= 0


def test_the_flat_index_finds_neighbours_far_from_0():
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) + 2000
    z = noisy(ReferenceSet(x), 0.5)
    _, ids = ReferenceSet(x, FlatIndex()).search(z, 5)
    assert torch.equal(ids, torch.cdist(z.double(), x.double()).topk(5, largest=False).indices)


# Full precision, whatever the process allows

MAKERS = {
    "Exact": Exact,
    "KNN": lambda: KNN(k=20, n=8),
    "MonteCarlo": lambda: MonteCarlo(n=8),
    "STF": lambda: STF(n=8),
    "SubspaceKNN": lambda: SubspaceKNN(r=5, n=8, compute="float32"),
    "Wiener": lambda: Wiener(r=5),
}
PRODUCTS = (
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::addmm_",
    "aten::baddbmm",
    "aten::mv",
    "aten::addmv",
)


class Precisions(TorchDispatchMode):
    """Records the precision that is set at each float32 product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in PRODUCTS and args[0].dtype == torch.float32:
            self.seen.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def medium():
    """A precision below the highest: processors with bfloat16 then round products."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "index", [TorchIndex("float32"), SubspaceIndex(r=5, compute="float32")], ids=type
)
def test_every_float32_product_has_full_precision(name, index, request):
    vectors = low_rank_vectors(N=300, d=64)
    x = vectors[:40]
    z, seen, means = with_noise(x, 2.0), [], []
    for _ in range(2):
        estimator, generator = MAKERS[name](), torch.Generator().manual_seed(0)
        with Precisions() as precisions:
            estimator.bind(ReferenceSet(vectors, index))
            means.append(estimator.posterior_mean(z, 2.0, x, generator))
            if hasattr(estimator, "certified_mean"):
                estimator.certified_mean(z, 2.0, x, generator)
        seen += precisions.seen
        request.getfixturevalue("medium")
    assert {*seen} == {"highest"}
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(*means)


@pytest.mark.usefixtures("medium")
def test_the_last_thread_that_leaves_restores_the_precision():
    inside, leave = threading.Event(), threading.Event()

    def work():
        with full_float32():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    with full_float32():
        thread.start()
        inside.wait()
    assert torch.get_float32_matmul_precision() == "highest"
    leave.set()
    thread.join()
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="one setting for all backends"
)
def test_precision_set_for_one_backend_is_restored():
    backend = torch.backends.mkldnn.matmul
    before, backend.fp32_precision = backend.fp32_precision, "bf16"
    try:
        with full_float32():
            assert backend.fp32_precision == "ieee"
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before
