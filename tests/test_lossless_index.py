"""Lossless 8-bit codes, against enumerated float64 distances and against FAISS's own codes."""

import numpy as np
import pytest
import torch

from lit_knn.errors import InputError
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet


def pixels(n=300, shape=(3, 4, 4), low=0, high=256):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (n, *shape), dtype=torch.uint8, generator=generator)


def relative_error(images, index, t):
    """The largest error of a squared distance when all images are found."""
    generator = torch.Generator().manual_seed(1)
    x = images.double() / 127.5 - 1
    z = (x[:20] + t * torch.randn(20, *images.shape[1:], generator=generator)).float()
    true = (z.double().unsqueeze(1) - x).square().flatten(2).sum(2)
    sq_dist, ids = ReferenceSet(images, index).search(z, len(images))
    assert torch.equal(ids.sort(1).values, torch.arange(len(images)).expand_as(ids))
    return ((sq_dist - true.gather(1, ids)).abs() / true.gather(1, ids)).max()


# FAISS handles one of the dimensions 16 at a time, the other not; latents are inside and far outside the pixel range.
@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 5, 5)])
@pytest.mark.parametrize("t", [0.5, 20.0])
@pytest.mark.parametrize(("factory", "nprobe"), [("SQ8", None), ("IVF4,SQ8", 4)])
def test_distances_to_pixels_are_exact(factory, nprobe, shape, t):
    error = relative_error(pixels(shape=shape), FaissIndex(factory, nprobe, lossless=True), t)
    assert error < 2e-6
    if t < 1:  # at larger t an error of half a grey level is not visible
        assert relative_error(pixels(shape=shape), FaissIndex(factory, nprobe), t) > 100 * error


@pytest.mark.parametrize(("low", "high"), [(0, 1), (255, 256), (100, 103)])
def test_images_of_few_grey_levels_are_exact_too(low, high):
    images = pixels(low=low, high=high)
    assert relative_error(images, FaissIndex("SQ8", lossless=True), 0.5) < 2e-6


def test_an_image_is_at_distance_zero_of_itself():
    images = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    reference = ReferenceSet(images, FaissIndex("SQ8", lossless=True))
    sq_dist, ids = reference.search(reference.gather(torch.arange(256)), 1)
    assert torch.equal(ids[:, 0], torch.arange(256))
    np.testing.assert_allclose(sq_dist, 0, atol=1e-12)


@pytest.mark.parametrize("factory", ["SQ8", "IVF4,SQ8"])
@pytest.mark.parametrize("row", [0, 299])
def test_floats_are_refused(factory, row):
    # This holds also if all values but one are pixels.
    images = pixels().float() / 127.5 - 1
    images[row, 0, 0, 0] = 0.3
    reference = ReferenceSet(images, FaissIndex(factory, lossless=True))
    with pytest.raises(InputError, match=r"lossless=True needs uint8 images, the data holds the float 0\.3$"):
        reference.build_index()
    images[row, 0, 0, 0] = 1 + 2 / 255  # on the grid of grey levels but outside the range
    with pytest.raises(InputError, match=r"1\.007"):
        reference.build_index()


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "PCA8,SQ8", "SQ6", "IVF4,PQ4"])
def test_other_factories_are_refused(factory):
    with pytest.raises(InputError, match=f"lossless=True is for SQ8 and IVF<c>,SQ8, not for factory='{factory}'"):
        FaissIndex(factory, lossless=True).check(300, 48)


def test_too_few_images_to_train_on_are_refused_with_the_reason_of_faiss():
    with pytest.raises(InputError, match=r"factory='PQ4': .*training points \(30\)") as error:
        ReferenceSet(pixels(30), FaissIndex("PQ4")).build_index()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("factory", "N", "d"), [("PCA40,Flat", 300, 20), ("PCA16,IVF4,SQ8", 10, 20)])
def test_more_principal_components_than_there_are_are_refused_before_they_are_computed(factory, N, d):
    with pytest.raises(InputError, match=rf"has \d+ components of min\(N, d\) = min\({N}, {d}\)"):
        FaissIndex(factory).check(N, d)


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("index", "N", "k", "words"),
    [
        (FaissIndex("SQ8"), 300, 8, "factory='SQ8' to a GPU.*TorchIndex"),
        (FaissIndex("PCA8,SQ8"), 300, 8, "factory='PCA8,SQ8' to a GPU"),
        (FaissIndex("HNSW8"), 300, 8, "factory='HNSW8' to a GPU"),
        (FaissIndex("IVF4_HNSW8,Flat"), 300, 8, "factory='IVF4_HNSW8,Flat' to a GPU"),
        (FaissIndex("Flat"), 5000, 2049, "k=2049: FAISS on a GPU finds at most 2048"),
        (FaissIndex("IVF4096,SQ8", nprobe=2049), 5000, 8, "nprobe=2049: FAISS on a GPU searches at most 2048"),
    ],
    ids=lambda value: value.factory if isinstance(value, FaissIndex) else None,
)
def test_what_faiss_cannot_do_on_a_gpu_is_refused_before_the_build_and_without_a_gpu(index, N, k, words):
    index.check(N, 48, torch.device("cpu"), k)
    with pytest.raises(InputError, match=words):
        index.check(N, 48, GPU, k)


@pytest.mark.parametrize(
    ("factory", "k"), [("Flat", 2048), ("IVF4,Flat", 2048), ("IVF4,SQ8", 512), ("PCA8,IVF4,SQ8", 512)]
)
def test_what_faiss_can_do_on_a_gpu_is_not_refused(factory, k):
    FaissIndex(factory).check(5000, 48, GPU, k)


@pytest.mark.gpu
def test_a_flat_8_bit_index_on_a_gpu_is_refused_and_torch_index_named():
    with pytest.raises(InputError, match="TorchIndex"):
        ReferenceSet(pixels(), FaissIndex("SQ8")).to("cuda").build_index()


def test_few_images_for_many_lists_are_said_in_one_line(capfd):
    with pytest.warns(UserWarning, match=r"^300 images are few for factory='IVF20,SQ8': .* at most 7 lists$"):
        ReferenceSet(pixels(300), FaissIndex("IVF20,SQ8")).build_index()
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


@pytest.mark.gpu
def test_lossless_lists_from_a_cache_are_exact_on_a_gpu(tmp_path):
    for _ in range(2):
        index = FaissIndex("IVF4,SQ8", 4, lossless=True, cache_dir=str(tmp_path))
        reference = ReferenceSet(pixels(), index).to("cuda")
        z = reference.gather(torch.arange(20, device="cuda")) + 0.5
        sq_dist, ids = reference.search(z, 300)
        true = (z.double().unsqueeze(1) - reference.gather(ids).double()).square().flatten(2).sum(2)
        torch.testing.assert_close(sq_dist.double(), true, rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("factory", ["Flat", "IVF4,SQ8"])
def test_half_precision_and_little_scratch_memory_find_near_the_same_on_a_gpu(factory):
    found = []
    for options in ({}, {"gpu_float16": True, "gpu_scratch_mib": 16}):
        reference = ReferenceSet(pixels(), FaissIndex(factory, **options)).to("cuda")
        found.append(reference.search(reference.gather(torch.arange(20, device="cuda")) + 0.5, 10)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0)


def test_scratch_memory_below_zero_is_refused():
    with pytest.raises(InputError, match="gpu_scratch_mib must be at least 0, got -1"):
        FaissIndex(gpu_scratch_mib=-1)
