"""The reference set and its FAISS index against scikit-learn's neighbours and an explicitly doubled set."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.index.base import Vectors
from lit_knn.reference import ReferenceSet


def pixels(n=30, c=3, h=4, w=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=generator)


def latents_near(reference, b=5, t=0.5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = reference.gather(torch.arange(b) * 3 % reference.N)
    return x + t * torch.randn(x.shape, generator=generator)


def sklearn_search(x, z, k):
    tree = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x.flatten(1).double().numpy())
    dist, ids = tree.kneighbors(z.flatten(1).double().numpy())
    return dist**2, ids


@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("kind", ["uint8", "float", "vectors"])
def test_flat_search_matches_scikit_learn(kind, k):
    images = pixels()
    if kind != "uint8":
        images = images.float() / 100
    if kind == "vectors":
        images = images.flatten(1)
    reference = ReferenceSet(images)
    x = images.float() / 127.5 - 1 if kind == "uint8" else images
    z = latents_near(reference)
    sq_dist, ids = reference.search(z, k)
    expected_sq_dist, expected_ids = sklearn_search(x, z, k)
    assert sq_dist.shape == ids.shape == (5, k)
    assert ids.dtype == torch.int64
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(sq_dist, expected_sq_dist, rtol=1e-4)
    assert (sq_dist.diff(dim=1) >= 0).all()


def test_pixels_scale_to_model_space():
    images = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    x = ReferenceSet(images).gather(torch.arange(256)).flatten()
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x, np.arange(256) / 127.5 - 1, atol=1.2e-7)
    assert x[0] == -1
    assert x[255] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_float_values_are_taken_as_they_are(dtype):
    values = (100 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    reference = ReferenceSet(values)
    assert torch.equal(reference.gather(torch.arange(6)), values.float())
    assert (reference.N, reference.d, reference.shape) == (6, 5, (5,))


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("ids_shape", [(), (1,), (7,), (2, 3), (2, 0), (0,), (2, 3, 4)])
def test_gather_takes_ids_of_any_shape(hflip, ids_shape):
    images = pixels()
    reference = ReferenceSet(images, hflip=hflip)
    everything = images.numpy() / np.float32(127.5) - 1
    everything = np.concatenate([everything, everything[..., ::-1]]) if hflip else everything
    assert len(everything) == reference.N
    ids = torch.randint(reference.N, ids_shape, generator=torch.Generator().manual_seed(2))
    x = reference.gather(ids)
    assert x.shape == (*ids_shape, 3, 4, 6)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x, everything[ids.numpy()], atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
@pytest.mark.parametrize("hflip", [False, True])
def test_chunks_stream_every_image_once_in_the_order_of_the_ids(rows, hflip):
    reference = ReferenceSet(pixels(), hflip=hflip)
    expected_start = 0
    for start, x in reference.chunks(rows):
        assert start == expected_start
        assert 1 <= len(x) <= rows
        assert torch.equal(x, reference.gather(torch.arange(start, start + len(x))))
        expected_start += len(x)
    assert expected_start == reference.N


def doubled_pair(float_images=False):
    """A set with hflip=True, and the same set with stored mirror images; both have the same ids."""
    images = pixels()
    images[4, :, :, 3:] = images[4, :, :, :3].flip(-1)  # its own mirror image: both ids must be found
    images = images.float() / 64 if float_images else images
    return ReferenceSet(images, hflip=True), ReferenceSet(torch.cat([images, images.flip(-1)]))


@pytest.mark.parametrize("k", [1, 5, 30, 31, 60])
@pytest.mark.parametrize("float_images", [False, True])
def test_hflip_search_equals_a_doubled_set(k, float_images):
    flipped, doubled = doubled_pair(float_images)
    z = latents_near(doubled, b=8)
    z = torch.cat([z, z.flip(-1), doubled.gather(torch.tensor([4, 34]))])
    sq_dist, ids = flipped.search(z, k)
    assert flipped.N == doubled.N == 60
    expected, _ = doubled.search(z, k)
    np.testing.assert_allclose(sq_dist, expected, rtol=1e-4, atol=1e-4)
    assert (sq_dist.diff(dim=1) >= 0).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    # An image that is its own mirror has two ids, so compare distances instead of ids.
    difference = flipped.gather(ids) - z.unsqueeze(1)
    np.testing.assert_allclose(difference.square().flatten(2).sum(2), expected, rtol=1e-4, atol=1e-4)
    if k == 60:
        assert all(sorted(row) == list(range(60)) for row in ids.tolist())


def test_labels():
    labels = torch.arange(30) % 7
    assert ReferenceSet(pixels()).labels is None
    assert torch.equal(ReferenceSet(pixels(), labels=labels.numpy()).labels, labels)
    assert torch.equal(ReferenceSet(pixels(), labels=labels, hflip=True).labels, labels.repeat(2))
    with pytest.raises(InputError, match="30"):
        ReferenceSet(pixels(), labels=labels[:-1])


@pytest.mark.parametrize(
    ("images", "hflip", "words"),
    [
        pytest.param(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), False, "shape", id="no images"),
        pytest.param(torch.zeros(0, 5), False, "shape", id="no vectors"),
        pytest.param(torch.zeros(3, 0), False, "shape", id="empty vectors"),
        pytest.param(torch.zeros(5), False, "shape", id="one dimension"),
        pytest.param(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), False, "item 1", id="NaN"),
        pytest.param(torch.tensor([[0.0, 1.0], [0.0, float("inf")]]), False, "item 1", id="inf"),
        pytest.param(torch.full((2, 2), 1e39, dtype=torch.float64), False, "finite", id="beyond float32"),
        pytest.param(torch.zeros(3, 1, 4, 4, dtype=torch.int64), False, "int64", id="int64"),
        pytest.param(torch.zeros(3, 1, 4, 4, dtype=torch.bool), False, "bool", id="bool"),
        pytest.param(torch.zeros(3, 4, 4, dtype=torch.uint8), False, "C, H, W", id="uint8 without channels"),
        pytest.param(torch.zeros(3, 5), True, "hflip", id="hflip on vectors"),
    ],
)
def test_bad_images_are_refused(images, hflip, words):
    with pytest.raises(InputError, match=words) as error:
        ReferenceSet(images, hflip=hflip)
    assert "\n" not in str(error.value)


def test_nan_far_down_is_found():
    images = torch.zeros(5000, 2)
    images[4500, 1] = float("nan")
    with pytest.raises(InputError, match="item 4500"):
        ReferenceSet(images)


@pytest.mark.parametrize(
    ("factory", "nprobe", "words"),
    [
        ("IVF4,Flat", 5, ["nprobe=5", "4 lists"]),
        ("Flat", 2, ["nprobe=2", "IVF"]),
        ("SQ8", 2, ["nprobe=2", "IVF"]),
        ("Bogus", None, ["Bogus", "tested kinds"]),
    ],
)
def test_bad_index_settings_are_refused_at_once(factory, nprobe, words):
    with pytest.raises(InputError) as error:
        FaissIndex(factory, nprobe)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def clustered(seed=0):
    """Four groups of 15 vectors, far from each other; each inverted list holds one."""
    generator = torch.Generator().manual_seed(seed)
    centres = 100 * torch.eye(4).repeat_interleave(15, 0)
    return centres + torch.randn(60, 4, generator=generator)


def test_missing_neighbours_are_last_with_infinite_distance():
    x = clustered()
    reference = ReferenceSet(x, FaissIndex("IVF4,Flat", nprobe=1))
    sq_dist, ids = reference.search(x[::7], 40)
    missing = ids < 0
    assert missing.any(1).all()  # a list has fewer than 40 vectors
    assert (ids[missing] == -1).all()
    assert sq_dist[missing].isinf().all()
    assert sq_dist[~missing].isfinite().all()
    assert not (missing[:, :-1] & ~missing[:, 1:]).any()
    expected, expected_ids = sklearn_search(x, x[::7], 15)
    if (missing.sum(1) == 25).all():  # the lists are the groups
        np.testing.assert_array_equal(np.sort(ids[:, :15]), np.sort(expected_ids))
        np.testing.assert_allclose(sq_dist[:, :15], expected, rtol=1e-4, atol=1e-4)
    all_lists = ReferenceSet(x, FaissIndex("IVF4,Flat", nprobe=4)).search(x[::7], 40)
    np.testing.assert_allclose(all_lists[0], sklearn_search(x, x[::7], 40)[0], rtol=1e-4, atol=1e-2)


def test_missing_neighbours_with_hflip_are_last_too():
    x = clustered().reshape(60, 1, 2, 2)
    reference = ReferenceSet(x, FaissIndex("IVF4,Flat", nprobe=1), hflip=True)
    sq_dist, ids = reference.search(x[::7], 100)
    missing = ids < 0
    assert missing.any(1).all()
    assert (ids[missing] == -1).all()
    assert sq_dist[missing].isinf().all()
    assert not (missing[:, :-1] & ~missing[:, 1:]).any()
    found = [row[row >= 0].tolist() for row in ids]
    assert all(len(set(row)) == len(row) and max(row) < 120 for row in found)
    assert any(max(row) >= 60 for row in found)


@pytest.mark.parametrize("factory", ["SQ8", "IVF4,SQ8", "IVF4,Flat"])
def test_approximate_search_is_ascending_and_near(factory):
    reference = ReferenceSet(pixels(), FaissIndex(factory, 4 if "IVF" in factory else None))
    z = latents_near(reference)
    sq_dist, ids = reference.search(z, 30)
    assert (sq_dist.diff(dim=1) >= 0).all()
    assert all(sorted(row) == list(range(30)) for row in ids.tolist())
    np.testing.assert_allclose(sq_dist, sklearn_search(reference.gather(torch.arange(30)), z, 30)[0], rtol=0.02)


def test_default_nprobe_searches_a_fiftieth_of_the_lists():
    # 2 of 100 lists are searched, so far fewer than all of the 2,000 vectors are found.
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    found = {}
    for nprobe in (None, 2, 100):
        ids = ReferenceSet(x, FaissIndex("IVF100,Flat", nprobe)).search(x[:50], 2000)[1]
        found[nprobe] = (ids >= 0).sum(1)
    assert torch.equal(found[None], found[2])
    assert (found[None] < 400).all()
    assert (found[100] == 2000).all()


class Sampled(FaissIndex):
    """An index that keeps the sample that it was trained with."""

    def build(self, vectors):
        self.sample = vectors.sample(200)
        super().build(vectors)


def test_indexes_are_trained_with_the_same_images_from_all_over_the_set():
    samples = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        reference = ReferenceSet(torch.arange(4000.0)[:, None], Sampled())
        reference.build_index()
        samples.append(reference.index.sample[:, 0])
    assert torch.equal(*samples)
    places = samples[0].sort().values
    assert len(places.unique()) == 200
    # Uniform draws are at most 2/sqrt(200) of the range away from an even spread, but for one sample in 1000.
    assert (places - torch.linspace(0, 4000, 200)).abs().max() < 4000 * 2 / math.sqrt(200)


@pytest.mark.parametrize("factory", ["IVF2,Flat", "IVF2,SQ8", "PCA4,IVF2,SQ8"])
def test_lists_are_trained_with_256_images_each(factory):
    x, asked = torch.randn(2000, 5), []

    def sample(size):
        asked.append(size)
        return x[:size]

    FaissIndex(factory).build(Vectors(lambda: iter([x]), sample, len(x), str))
    assert max(asked) == 2 * 256


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_all_images_once(ranks, hflip):
    images = torch.randint(0, 256, (11, 1, 4, 4), dtype=torch.uint8)
    reference = ReferenceSet(images, hflip=hflip)
    ids = []
    for rank in range(ranks):
        for own, x in reference.share(rank, ranks, 2):
            assert torch.equal(x, reference.gather(own))
            ids += own.tolist()
    assert sorted(ids) == list(range(reference.N))


def test_two_sets_with_one_index_search_their_own_images():
    index = TorchIndex("float32")
    streams = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    first, second = (ReferenceSet(torch.randn(50, 6, generator=stream), index) for stream in streams)
    for reference in (first, second, first):
        own = reference.gather(torch.arange(50))
        assert torch.equal(reference.search(own, 1)[1][:, 0], torch.arange(50))


class FindsThree(TorchIndex):
    """An index that finds at most three neighbours."""

    def check(self, N, d, device=None, k=1):
        if k > 3:
            raise InputError(f"k={k} is more than 3")

    def build(self, vectors):
        pytest.fail("the index was built")


def test_a_k_that_the_index_cannot_find_is_refused_before_the_build():
    with pytest.raises(InputError, match="k=4 is more than 3"):
        KNN(k=4, n=2).bind(ReferenceSet(pixels(), FindsThree("float32")))
