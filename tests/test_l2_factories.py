"""Which FAISS factories are accepted: those whose distances are squared L2, measured against float64."""

import numpy as np
import pytest
import torch

from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.image_files import refusal

N, D = 300, 32
L2 = [
    "Flat", "SQ8", "SQ6", "SQfp16", "PQ8x4", "PQ8x4fs", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ8x4fs", "HNSW8,Flat",
    "HNSW8,SQ8", "PCA16,Flat", "PCAR16,IVF4,SQ8", "RR,Flat", "RR16,Flat", "Pad64,Flat", "SQ8,RFlat", "LSH,RFlat",
    "RaBitQ4",
]  # fmt: skip
OTHER = [
    "LSH", "LSHr", "LSHrt", "ITQ,LSH", "ITQ16,Flat", "L2norm,Flat", "L2norm,IVF4,SQ8", "PCAW16,Flat",
    "PCAWR16,IVF4,SQ8", "PCA16,L2norm,Flat", "SQ8_direct", "SQ8_direct_signed", "IVF4,SQ8_direct",
    "SQ8,Refine(SQ8_direct)",
]  # fmt: skip


def images():
    # Lengths differ and the mean is not 0, so that a cosine or a Hamming distance differs from L2.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) * 0.3 * 0.97 ** torch.arange(D) + 0.2
    return x * torch.linspace(0.5, 2, N).unsqueeze(1)


@pytest.mark.filterwarnings("ignore:.*images are few")
@pytest.mark.parametrize("factory", L2)
def test_accepted_factories_give_squared_l2_distances(factory):
    x = images()
    z = x[::10] + 0.2 * torch.randn(30, D, generator=torch.Generator().manual_seed(1))
    sq_dist, ids = ReferenceSet(x, FaissIndex(factory)).search(z, 5)
    found = (ids >= 0).numpy()
    true = (z.double().unsqueeze(1) - x[ids.clamp(min=0)].double()).square().sum(2).numpy()
    ratio = sq_dist.numpy()[found] / true[found]
    # Codes of a few bits lose length; other distances are off by several times.
    assert 0.7 < np.median(ratio) < 1.3
    assert np.corrcoef(sq_dist.numpy()[found], true[found])[0, 1] > 0.7


@pytest.mark.parametrize("factory", OTHER)
def test_other_distances_are_refused_before_the_build(factory):
    message = refusal(FaissIndex(factory).check, N, D)
    assert repr(factory) in message
    assert "L2" in message


def test_an_index_that_cannot_search_says_so():
    reference = ReferenceSet(images(), FaissIndex("Residual4x4,PQ4"))
    assert "cannot search factory='Residual4x4,PQ4'" in refusal(reference.search, images()[:2], 3)


@pytest.mark.parametrize(
    ("factory", "number"),
    [
        ("HNSW0", "HNSW0"), ("HNSW1,SQ8", "HNSW1"), ("NSG00", "NSG00"), ("NSG1", "NSG1"), ("IVF4_HNSW1,Flat", "HNSW1"),
        ("IVF4(HNSW0),Flat", "HNSW0"), ("PQ8x0", "x0"), ("RQ0x4", "RQ0"),
    ],
)  # fmt: skip
def test_numbers_that_would_end_the_process_are_refused(factory, number):
    assert refusal(FaissIndex(factory).check, N, D).endswith(f"has a number that is too small: {number}")
