"""FAISS's searches in model space, in components and in lossless codes, against distances enumerated in float64."""

import numpy as np
import pytest
import torch

from benchmarks.common import in_own_process
from lit_knn.common.errors import InputError
from lit_knn.index import FaissIndex, SubspaceIndex
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors, noisy, speckles

pytestmark = pytest.mark.filterwarnings("ignore:.*images are few")
N, D, R = 400, 40, 6


def enumerated(z, x):
    """Squared distances in float64, (B, N)."""
    return (z.double().flatten(1).unsqueeze(1) - x.double().flatten(1)).square().sum(2)


@pytest.mark.parametrize(
    "factory", ["Flat", "SQ8", "IVF4,Flat", "IVF4,SQ8", "PCA20,Flat", "PCA20,IVF4,SQ8"]
)
def test_accepted_factories_give_squared_l2_distances(factory):
    # Lengths differ and the mean is not 0, so that a cosine or a Hamming distance differs from L2.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) * 0.3 * 0.97 ** torch.arange(D) + 0.2
    x = x * torch.linspace(0.5, 2, N).unsqueeze(1)
    z = noisy(x[::10], 0.2)
    sq_dist, ids = ReferenceSet(x, FaissIndex(factory)).search(z, 5)
    found = ids >= 0
    sq_dist, true = (
        sq_dist[found].numpy(),
        enumerated(z, x).gather(1, ids.clamp(min=0))[found].numpy(),
    )
    assert 0.7 < np.median(sq_dist / true) < 1.3
    assert np.corrcoef(sq_dist, true)[0, 1] > 0.7


OTHER = [
    "",
    "flat",
    "Flat\n",
    "HNSW8,Flat",
    "OPQ4,Flat",
    "PCA0,Flat",
    "IVF0,Flat",
    "IVF4",
    "IVF4,PCA4,Flat",
    "SQ8,RFlat",
]
LOSSLESS = "lossless=True is for SQ8 and IVF<c>,SQ8, not for factory="
REFUSED = [
    *[
        ((factory,), "is not one of the tested kinds: Flat, SQ8, IVF<c>,Flat, IVF<c>,SQ8, PCA<r>,")
        for factory in OTHER
    ],
    *[
        ((factory, None, True), f"{LOSSLESS}'{factory}'")
        for factory in ("Flat", "IVF4,Flat", "PCA8,SQ8")
    ],
    (("IVF4,Flat", 5), "nprobe=5 "),
    (("IVF4,Flat", 0), "nprobe=0 "),
    (("SQ8", 2), "nprobe=2 "),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_settings_that_cannot_be_are_refused_at_once(options, words):
    with pytest.raises(InputError, match=words):
        FaissIndex(*options)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: FaissIndex(f"PCA{R},Flat", cache_dir=folder),
        lambda folder: FaissIndex(f"PCA{R},IVF4,Flat", 4, cache_dir=folder),
        lambda folder: SubspaceIndex(R, "float32"),
    ],
)
def test_distances_are_exact_where_projection_keeps_everything(make, tmp_path):
    # The images lie in an affine subspace away from the origin, and the queries do not.
    basis = torch.linalg.qr(torch.randn(D, R))[0]
    x = torch.randn(N, R) @ basis.T + torch.randn(D)
    z = x[:5] + 3 * torch.randn(5, D)
    exact = enumerated(z, x).sort(dim=1)
    # without a cache, built for it and read from it
    for folder in (None, str(tmp_path), str(tmp_path)):
        sq_dist, ids = ReferenceSet(x, make(folder)).search(z, 10)
        torch.testing.assert_close(sq_dist.double(), exact.values[:, :10], rtol=1e-4, atol=1e-3)
        assert torch.equal(ids, exact.indices[:, :10])


@pytest.mark.parametrize(("nprobe", "lists"), [(None, 2), (16, 16)])
def test_default_nprobe_is_a_fiftieth_and_lookups_change_nothing(nprobe, lists):
    x = low_rank_vectors(400)
    z = noisy(x[:50], 3.0)
    # One list holds few of the nearest images, so a search of one list finds others.
    alone, before = (
        ReferenceSet(x, FaissIndex("IVF100,Flat", number)).search(z, 20) for number in (1, lists)
    )
    assert not torch.equal(alone[1], before[1])
    reference = ReferenceSet(x, FaissIndex("IVF100,Flat", nprobe))
    assert all(map(torch.equal, reference.search(z, 20), before))
    assert reference.locate(x[:50]).tolist() == list(range(50))
    assert all(map(torch.equal, reference.search(z, 20), before))


# Lossless codes of 8 bits


def relative_error(images, index, t):
    """The largest error of a squared distance when all images are found."""
    x = images.double() / 127.5 - 1
    z = noisy(x[:20], t).float()
    sq_dist, ids = ReferenceSet(images, index).search(z, len(images))
    assert torch.equal(ids.sort(1).values, torch.arange(len(images)).expand_as(ids))
    true = enumerated(z, x).gather(1, ids)
    return ((sq_dist - true).abs() / true).max()


def test_another_process_goes_on_with_a_bound_index():
    """A spawned worker, or a program that loads a pickle, gets a FAISS that does not take tensors yet."""
    reference = ReferenceSet(speckles(300, (1, 4, 4)), FaissIndex())
    queries = noisy(reference.gather(torch.arange(4)), 1.0)
    expected = reference.search(queries, 3)
    for theirs, ours in zip(in_own_process(reference.search, queries, 3), expected, strict=True):
        torch.testing.assert_close(theirs, ours)


# FAISS handles one of the dimensions 16 at a time, the other not; latents are inside and far outside the pixel range.
@pytest.mark.parametrize(("shape", "t"), [((3, 4, 4), 0.5), ((1, 5, 5), 0.5), ((1, 5, 5), 20.0)])
@pytest.mark.parametrize(("factory", "nprobe"), [("SQ8", None), ("IVF4,SQ8", 4)])
def test_lossless_distances_to_pixels_are_exact(factory, nprobe, shape, t):
    error = relative_error(speckles(300, shape), FaissIndex(factory, nprobe, lossless=True), t)
    assert error < 2e-6
    if t < 1:  # at larger t an error of half a grey level is not visible
        assert relative_error(speckles(300, shape), FaissIndex(factory, nprobe), t) > 100 * error


@pytest.mark.parametrize("row", [0, 299])
# the second is on the grid of grey levels but outside the range
@pytest.mark.parametrize("value", [0.3, 1 + 2 / 255])
def test_lossless_codes_refuse_floats_even_among_pixels(row, value):
    images = speckles(300, (3, 4, 4)).float() / 127.5 - 1
    images[row, 0, 0, 0] = value
    reference = ReferenceSet(images, FaissIndex("IVF4,SQ8", lossless=True))
    with pytest.raises(
        InputError,
        match=rf"lossless=True needs uint8 images, the data holds the float {value:.6g}$",
    ):
        reference.build_index()


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
def test_lossless_lists_from_a_cache_are_exact_on_a_gpu(tmp_path):
    for _ in range(2):
        index = FaissIndex("IVF4,SQ8", 4, lossless=True, cache_dir=str(tmp_path))
        reference = ReferenceSet(speckles(300, (3, 4, 4)), index).to("cuda")
        z = reference.gather(torch.arange(20, device="cuda")) + 0.5
        sq_dist, ids = reference.search(z, 300)
        true = enumerated(z, reference.gather(torch.arange(300, device="cuda"))).gather(1, ids)
        torch.testing.assert_close(sq_dist.double(), true, rtol=1e-4, atol=0)


def test_places_without_a_neighbour_are_infinitely_far():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    sq_dist, ids = ReferenceSet(x, FaissIndex("IVF8,Flat", nprobe=1)).search(x, 40)
    assert (ids < 0).any()
    assert torch.equal(sq_dist.isinf(), ids < 0)
