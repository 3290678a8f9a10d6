"""The reference set and its search against scikit-learn's neighbours and an explicitly doubled set."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch.utils.data import TensorDataset

from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN
from lit_knn.index import FaissIndex, FlatIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from tests.config_files import RUNS, resolved
from tests.toys import noisy, speckles

WITH_FLIPS = pytest.mark.parametrize("hflip", [False, True])
PIXELS = speckles(30, (3, 4, 6))


def latents_near(reference, b=5, t=0.5):
    return noisy(reference.gather(torch.arange(b) * 3 % reference.N), t)


def sklearn_search(x, z, k):
    tree = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x.flatten(1).double().numpy())
    dist, ids = tree.kneighbors(z.flatten(1).double().numpy())
    return dist**2, ids


@pytest.mark.parametrize("images", [PIXELS, PIXELS.float() / 100, PIXELS.flatten(1) / 100.0])
def test_flat_search_matches_scikit_learn(images):
    reference = ReferenceSet(images)
    x = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images
    z = latents_near(reference)
    for k in (1, 4, 30):
        sq_dist, ids = reference.search(z, k)
        expected_sq_dist, expected_ids = sklearn_search(x, z, k)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(sq_dist, expected_sq_dist, rtol=1e-4)


def test_pixels_are_scaled_and_floats_taken_as_they_are():
    x = (
        ReferenceSet(torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1))
        .gather(torch.arange(256))
        .flatten()
    )
    np.testing.assert_allclose(x, np.arange(256) / 127.5 - 1, atol=1.2e-7)
    assert (x[0], x[255]) == (-1, 1)
    for dtype in (torch.float64, torch.float16):
        values = (100 * torch.randn(6, 5)).to(dtype)
        reference = ReferenceSet(values)
        assert torch.equal(reference.gather(torch.arange(6)), values.float())
        assert (reference.N, reference.d, reference.shape) == (6, 5, (5,))
        assert reference.largest == values.abs().max()


@WITH_FLIPS
def test_images_come_by_ids_in_chunks_and_in_shares_of_ranks(hflip):
    images, labels = PIXELS, torch.arange(30) % 7
    reference, twice = ReferenceSet(images, hflip=hflip, labels=labels.numpy()), 1 + hflip
    assert torch.equal(reference.labels, labels.repeat(twice))
    everything = images.numpy() / np.float32(127.5) - 1
    everything = np.concatenate([everything, everything[..., ::-1]][:twice])
    for shape in ((), (7,), (2, 0), (2, 3, 4)):
        ids = torch.randint(reference.N, shape)
        np.testing.assert_allclose(reference.gather(ids), everything[ids.numpy()], atol=1e-6)
    for rows in (1, 7, 1000):
        chunks = dict(reference.chunks(rows))
        assert list(chunks) == np.cumsum([0, *map(len, chunks.values())])[:-1].tolist()
        assert max(map(len, chunks.values())) <= rows
        np.testing.assert_allclose(torch.cat([*chunks.values()]), everything, atol=1e-6)
    for ranks, mirrored in ((1, True), (2, True), (4, True), (3, False)):
        shares = [
            part for rank in range(ranks) for part in reference.share(rank, ranks, 2, mirrored)
        ]
        ids, x = (torch.cat(parts) for parts in zip(*shares, strict=True))
        assert sorted(ids.tolist()) == list(range(30 * twice if mirrored else 30))
        np.testing.assert_allclose(x, everything[ids.numpy()], atol=1e-6)


@pytest.mark.parametrize(("k", "float_images"), [(1, False), (5, True), (31, False), (60, True)])
def test_hflip_search_equals_a_doubled_set(k, float_images):
    images = PIXELS.clone()
    # its own mirror image: both ids must be found
    images[4, :, :, 3:] = images[4, :, :, :3].flip(-1)
    images = images.float() / 64 if float_images else images
    flipped, doubled = (
        ReferenceSet(images, hflip=True),
        ReferenceSet(torch.cat([images, images.flip(-1)])),
    )
    # narrow latents of many channels
    assert ReferenceSet(torch.zeros(2, 16, 4, 4), hflip=True).N == 4
    z = latents_near(doubled, b=8)
    z = torch.cat([z, z.flip(-1), doubled.gather(torch.tensor([4, 34]))])
    sq_dist, ids = flipped.search(z, k)
    expected, _ = doubled.search(z, k)
    np.testing.assert_allclose(sq_dist, expected, rtol=1e-4, atol=1e-4)
    assert (sq_dist.diff(dim=1) >= 0).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    # An image that is its own mirror has two ids, so compare distances instead of ids.
    difference = flipped.gather(ids) - z.unsqueeze(1)
    np.testing.assert_allclose(
        difference.square().flatten(2).sum(2), expected, rtol=1e-4, atol=1e-4
    )


def test_digits_and_the_figures_of_estimators_are_not_flipped():
    flipped = [path for path in RUNS if resolved(path)["data"].get("init_args", {}).get("hflip")]
    assert len(flipped) >= 5
    assert not [
        path
        for path in flipped
        if "digits" in path.name or path.parent.name in ("figure1", "figure3")
    ]


NAN_FAR_DOWN = torch.zeros(5000, 2).index_put(
    (torch.tensor(4500), torch.tensor(1)), torch.tensor(torch.nan)
)


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (torch.zeros(0, 5), {}, "shape"),
        (torch.zeros(3, 0), {}, "shape"),
        (torch.zeros(5), {}, "shape"),
        (NAN_FAR_DOWN, {}, "item 4500"),
        (torch.tensor([[0.0, 1.0], [0.0, -math.inf]]), {}, "item 1"),
        (torch.full((2, 2), 1e39, dtype=torch.float64), {}, "finite"),
        (torch.zeros(3, 1, 4, 4, dtype=torch.int64), {}, "int64"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), {}, "C, H, W"),
        (torch.zeros(3, 8, 8, 3, dtype=torch.uint8), {"hflip": True}, "C, H, W"),
        (torch.zeros(3, 8, 8, 3), {"hflip": True}, "C, H, W"),
        (torch.zeros(3, 5), {"hflip": True}, "hflip"),
        (PIXELS, {"labels": torch.arange(29)}, "30"),
        (
            PIXELS,
            {"labels": ["cat"] * 30},
            "^labels must be a tensor or an array of numbers, got list",
        ),
        (TensorDataset(PIXELS), {}, "got TensorDataset; of a data set, stack its items"),
        (iter(PIXELS), {}, "^images must be a tensor .* got tuple_iterator"),
    ],
)
def test_bad_images_are_refused(images, options, words):
    with pytest.raises(InputError, match=words):
        ReferenceSet(images, **options)


@pytest.mark.parametrize("ids", [torch.tensor([True, False, True]), torch.tensor([0.0, 1.0])])
def test_what_is_no_list_of_numbers_is_refused(ids):
    with pytest.raises(
        InputError, match=f"ids must be integers, got {ids.dtype}; for a mask give mask.nonzero"
    ):
        ReferenceSet(torch.zeros(3, 2)).gather(ids)


@WITH_FLIPS
def test_missing_neighbours_are_last_with_infinite_distance(hflip):
    # Four groups of 15 vectors, far from each other; each inverted list holds one.
    x = (100 * torch.eye(4).repeat_interleave(15, 0) + torch.randn(60, 4)).reshape(60, 1, 2, 2)
    both, z, k = torch.cat([x, x.flip(-1)][: 1 + hflip]), x[::7], 100 if hflip else 40
    sq_dist, ids = ReferenceSet(x, FaissIndex("IVF4,Flat", nprobe=1), hflip=hflip).search(z, k)
    missing = ids < 0
    assert missing.any(1).all()  # the searched lists have fewer vectors
    assert (ids[missing] == -1).all()
    assert torch.equal(sq_dist.isinf(), missing)
    assert not (missing[:, :-1] & ~missing[:, 1:]).any()
    found = [row[row >= 0].tolist() for row in ids]
    assert all(len(set(row)) == len(row) for row in found)
    differences = (both[ids] - z[:, None]).flatten(2).square().sum(2)
    np.testing.assert_allclose(sq_dist[~missing], differences[~missing], rtol=1e-4, atol=1e-2)
    all_lists, _ = ReferenceSet(x, FaissIndex("IVF4,Flat", nprobe=4), hflip=hflip).search(z, 40)
    np.testing.assert_allclose(all_lists, sklearn_search(both, z, 40)[0], rtol=1e-4, atol=1e-2)


class Sampled(FlatIndex):
    """An index that keeps a sample as it would be trained with."""

    def build(self, vectors):
        self.sample = vectors.sample(200).flatten()


def test_indexes_train_on_same_images_from_all_over_the_set():
    samples = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        reference = ReferenceSet(torch.arange(4000.0)[:, None], Sampled())
        reference.build_index()
        samples.append(reference.index.sample)
    assert torch.equal(*samples)
    assert len(samples[0].unique()) == 200
    # Uniform draws are at most 2/sqrt(200) of the range away from an even spread, but for one sample in 1000.
    assert (
        samples[0].sort().values - torch.linspace(0, 4000, 200)
    ).abs().max() < 4000 * 2 / math.sqrt(200)


def test_two_sets_with_one_index_search_their_own_images():
    index = TorchIndex("float32")
    first, second = (ReferenceSet(torch.randn(50, 6), index) for _ in range(2))
    for reference in (first, second, first):
        own = reference.gather(torch.arange(50))
        assert torch.equal(reference.search(own, 1)[1][:, 0], torch.arange(50))


@pytest.mark.gpu
@pytest.mark.parametrize("index", [None, FlatIndex()], ids=["default", "given"])
@pytest.mark.parametrize(
    ("images", "on_cuda"), [(PIXELS, TorchIndex), (PIXELS.float() / 100, FlatIndex)]
)
def test_default_index_is_of_the_device_and_a_given_one_moves(images, on_cuda, index):
    if images.is_floating_point():
        images[-1] = 1e4  # In 8 bits all other images would be one.
    reference = ReferenceSet(images, index)
    z = latents_near(reference)
    nearest = sklearn_search(reference.gather(torch.arange(30)), z, 3)[1]
    for device, default in (("cpu", FaissIndex), ("cuda", on_cuda)):
        np.testing.assert_array_equal(
            reference.to(device).search(z.to(device), 3)[1].cpu(), nearest
        )
        expected = default if index is None else FlatIndex
        assert type(reference.index) is type(reference.subset(slice(0, 9), 0).index) is expected


class FindsThree(TorchIndex):
    """An index that finds at most three neighbours."""

    def check(self, N, d, device=None, k=1):
        if k > 3:
            raise InputError(f"k={k} is more than 3")

    def build(self, vectors):
        pytest.fail("the index was built")


def test_unfindable_k_is_refused_before_the_build():
    with pytest.raises(InputError, match="k=4 is more than 3"):
        KNN(k=4, n=2).bind(ReferenceSet(PIXELS, FindsThree("float32")))


def test_backward_arrays_and_lists_of_tensors_are_sets():
    forward = ReferenceSet(PIXELS)
    for images in (np.asarray(PIXELS)[::-1], list(torch.as_tensor(PIXELS).flip(0))):
        backward = ReferenceSet(images)
        assert torch.equal(backward.images.flip(0), forward.images)
