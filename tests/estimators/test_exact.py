"""The exact mean by float32 products with float64 repairs, against enumeration in float64."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import Exact, exact
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from tests.toys import pixels, two_groups


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def worst(reference, z, t):
    """The largest squared error per dimension over the latents, before the mean is rounded to float32."""
    expected = posterior_mean(z, reference.gather(torch.arange(reference.N)), t)
    mean, _ = exact.exact_sums(reference, z, torch.full((len(z),), t, dtype=torch.float64))
    return (mean - expected).square().flatten(1).mean(1).max().item()


def worst_near(reference, t, latents=16):
    """The same, for latents of some images."""
    x = reference.gather(torch.randint(reference.N, (latents,), generator=seeded(1)))
    return worst(reference, x + t * torch.randn(x.shape, generator=seeded(2)), t)


LEVELS = [1e-30, 0.002, 0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 80.0]


@pytest.mark.parametrize("t", LEVELS)
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("kind", ["smooth", "two groups", "noise", "floats"])
def test_it_is_the_enumerated_mean(kind, hflip, t):
    images = {
        "smooth": pixels(N=400),
        "two groups": two_groups(N=300),
        "noise": torch.randint(256, (500, 3, 16, 16), dtype=torch.uint8, generator=seeded()),
        "floats": torch.randn(300, 2, 6, 6, generator=seeded()),
    }[kind]
    assert worst_near(ReferenceSet(images, hflip=hflip), t) < 1e-12


@pytest.mark.parametrize("t", [0.05, 0.2, 0.5, 1.0, 3.0])
def test_floats_far_from_0_keep_their_digits(t, monkeypatch):
    # Plain products in float32 have errors of 1e-4 and 1e-7 at t = 0.5. Differences from the mean need no float64.
    with monkeypatch.context() as context:
        context.delattr(exact, "float_sums")
        assert worst_near(ReferenceSet(torch.randn(20_000, 16, generator=seeded()) + 100), t) < 1e-12
    sides = 60 * torch.randint(2, (20_000, 1), generator=seeded(3)) - 30
    clusters = ReferenceSet(torch.randn(20_000, 16, generator=seeded()) + sides)
    assert worst_near(clusters, t) < 2e-11  # rounding the mean, a number of 30, to float32 gives 5e-13
    mirrored = torch.randn(3_000, 1, 4, 4, generator=seeded()) + torch.arange(4) * 50
    assert worst_near(ReferenceSet(mirrored, hflip=True), t) < 1e-11


@pytest.mark.parametrize("t", [0.005, 0.02, 0.05, 0.1, 0.5, 1.0])
def test_many_near_points_of_few_dimensions(t):
    # Far more than 32 points share the posterior, and one float32 sum over 50,000 would lose five digits.
    assert worst_near(ReferenceSet(torch.randn(50_000, 2, generator=seeded())), t) < 1e-11


@pytest.mark.parametrize("t", [0.002, 0.05, 1.0, 10.0])
def test_more_copies_of_an_image_than_are_computed_again(t):
    images = torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8, generator=seeded()).repeat_interleave(50, 0)
    assert worst_near(ReferenceSet(images, hflip=True), t) < 1e-11


@pytest.mark.parametrize("t", [0.002, 0.005, 0.02])
def test_ties_of_more_images_than_are_computed_again(t):
    # At d = 12,288 and small t, float32 rounds the log-likelihoods by up to a hundred.
    pair = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8, generator=seeded())
    pair[1] = pair[0]
    pair[1, 0, 0, :8] ^= 1
    far = torch.randint(256, (50, 3, 64, 64), dtype=torch.uint8, generator=seeded(3))
    between = ReferenceSet(pair).gather(torch.arange(2)).mean(0, keepdim=True)
    z = between + t * torch.randn(8, 3, 64, 64, generator=seeded(1))
    assert worst(ReferenceSet(torch.cat([pair.repeat_interleave(50, 0), far])), z, t) < 1e-20


def test_what_only_many_images_together_weigh_is_not_lost():
    # Each of 20,000 images has at most 1/30,000 of the largest weight, so that one long float32 sum would lose them.
    images = torch.randint(100, 102, (20_000, 1, 4, 4), dtype=torch.uint8, generator=seeded())
    images[:40] = 20
    reference = ReferenceSet(images)
    x = reference.gather(torch.arange(20_000))
    z = torch.cat([torch.lerp(x[:1], x[100:101], share) for share in (0.38, 0.40)])
    weights = torch.softmax(-torch.cdist(z.flatten(1), x.flatten(1)).square() / (2 * 0.25**2), 1)
    assert (weights[:, 40:].sum(1) > 2e-3).all()
    assert worst(reference, z, 0.25) < 1e-9


def test_chunks_and_groups_make_no_difference(monkeypatch):
    reference = ReferenceSet(pixels(N=300), hflip=True)
    z, t = torch.randn(20, *reference.shape) * 3, torch.logspace(-1, 1, 20)
    whole = Exact().bind(reference).posterior_mean(z, t)
    for name, value in {"CHUNK_BYTES": 4 * reference.d * 7, "SCORE_BYTES": 1, "MIN_LATENTS": 3, "TERMS": 20}.items():
        monkeypatch.setattr(exact, name, value)
    again = Exact().bind(ReferenceSet(pixels(N=300), hflip=True)).posterior_mean(z, t)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-6)


def test_a_mapped_file_gives_the_same_as_memory(tmp_path):
    images = pixels(N=200)
    np.save(tmp_path / "x.npy", images.numpy())
    mapped = ReferenceSet(np.load(tmp_path / "x.npy", mmap_mode="c"))
    z = torch.randn(9, *mapped.shape)
    for t in (0.3, 5.0):
        means = [Exact().bind(reference).posterior_mean(z, t) for reference in (mapped, ReferenceSet(images))]
        assert torch.equal(*means)
