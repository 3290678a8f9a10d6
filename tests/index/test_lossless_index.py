"""Lossless 8-bit codes, against enumerated float64 distances and against FAISS's own codes."""

import pytest
import torch

from lit_knn.common.errors import InputError
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


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "PCA8,SQ8"])
def test_other_factories_are_refused(factory):
    with pytest.raises(InputError, match=f"lossless=True is for SQ8 and IVF<c>,SQ8, not for factory='{factory}'"):
        FaissIndex(factory, lossless=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
def test_lossless_lists_from_a_cache_are_exact_on_a_gpu(tmp_path):
    for _ in range(2):
        index = FaissIndex("IVF4,SQ8", 4, lossless=True, cache_dir=str(tmp_path))
        reference = ReferenceSet(pixels(), index).to("cuda")
        z = reference.gather(torch.arange(20, device="cuda")) + 0.5
        sq_dist, ids = reference.search(z, 300)
        true = (z.double().unsqueeze(1) - reference.gather(ids).double()).square().flatten(2).sum(2)
        torch.testing.assert_close(sq_dist.double(), true, rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("real_gpu")
@pytest.mark.parametrize("factory", ["Flat", "IVF4,SQ8"])
def test_half_precision_and_little_scratch_memory_find_near_the_same_on_a_gpu(factory):
    found = []
    for options in ({}, {"gpu_float16": True, "gpu_scratch_mib": 16}):
        reference = ReferenceSet(pixels(), FaissIndex(factory, **options)).to("cuda")
        found.append(reference.search(reference.gather(torch.arange(20, device="cuda")) + 0.5, 10)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0)
