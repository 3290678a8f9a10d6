"""Distances to drawn images and their means, gathered or read in place on a GPU, against float64."""

from pathlib import Path

import pytest
import torch

from lit_knn.estimators import UniformSNIS
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference import gathered as module
from lit_knn.reference.gathered import Gathered, Stored
from tests.toys import noisy, pixels

N, B, n = 60, 5, 9
FLOATS = torch.randn(N, 2, 4, 6, generator=torch.Generator().manual_seed(0))
SETS = {
    "mirrored pixels": lambda: ReferenceSet(pixels(N), hflip=True),
    "vectors": lambda: ReferenceSet(FLOATS.flatten(1)),
    "mirrored floats": lambda: ReferenceSet(FLOATS, hflip=True),
    "not contiguous": lambda: ReferenceSet(pixels(N).permute(0, 1, 3, 2), hflip=True),
}


def drawn(reference):
    """Ids, weights with those of a source first, latents and sources."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(reference.N, (B, n), generator=generator)
    z = noisy(reference.gather(ids[:, 0]), 0.1)
    weights = torch.rand(B, 1 + n, generator=generator, dtype=torch.float64)
    return (
        ids,
        weights / weights.sum(1, keepdim=True),
        z,
        torch.randn(B, *reference.shape, generator=generator),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_distances_means_and_deviations_equal_enumerated_ones(name, stored):
    host, reference = SETS[name](), SETS[name]().to("cuda")
    ids, weights, z, source = drawn(host)
    for given in (source.cuda(), None):
        x, own = torch.cat([source[:, None].double(), host.gather(ids).double()], 1), weights
        if given is None:
            x, own = x[:, 1:], weights[:, 1:] / weights[:, 1:].sum(1, keepdim=True)
        images = Stored(reference, ids.cuda(), given) if stored else Gathered(x.float().cuda())
        assert images.places == x.shape[1]
        sq_dist = (x - z.double()[:, None]).square().flatten(2).sum(2)
        # float32 rounds each of some 100 differences by 6e-8 of its size.
        torch.testing.assert_close(images.sq_dist(z.cuda()).cpu(), sq_dist, rtol=2e-6, atol=0)
        mean = torch.einsum("bn,bn...->b...", own, x)
        torch.testing.assert_close(images.mean(own.cuda()).cpu().double(), mean, rtol=0, atol=1e-6)
        # The weights of a deviation need not sum to 1.
        scaled = own * torch.tensor([1.0, 0.3, 5.0, 0.0, 1e-30])[:, None]
        total = torch.einsum("bn,bn...->b...", scaled, x - z.double()[:, None])
        found = images.deviation(scaled.cuda(), z.cuda()).cpu().double()
        torch.testing.assert_close(found, total, rtol=0, atol=5e-6)
    if stored:  # The source alone is its own mean.
        alone = Stored(reference, torch.empty(B, 0, dtype=torch.long).cuda(), source.cuda())
        assert torch.equal(
            alone.mean(torch.ones(B, 1, dtype=torch.float64).cuda()).cpu(), source.double()
        )
        assert alone.sq_dist(source.cuda()).cpu().tolist() == [[0.0]] * B


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored pixels", "vectors"])
def test_compiled_functions_compute_the_same(name):
    reference = SETS[name]()
    ids, weights, z, source = drawn(reference)
    images = Stored(reference, ids, source)
    with torch.compiler.set_stance("force_eager"):
        expected = images.sq_dist(z), images.mean(weights)
    for found, own in zip((images.sq_dist(z), images.mean(weights)), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=2e-6, atol=1e-6)


def test_a_machine_whose_compiler_does_not_work_gets_a_warning(monkeypatch):
    # No compiler can be run.
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(Path(__file__)),))
    with pytest.warns(
        UserWarning, match="drawn images are copied; torch.compile does not work here: "
    ):
        assert not module.can_compile.__wrapped__(torch.device("cpu"))


@pytest.mark.usefixtures("stand_in")
def test_gpu_estimate_reads_images_in_two_compiled_functions(monkeypatch):
    called, compile_it = [], module.compiled
    monkeypatch.setattr(
        module, "compiled", lambda function: called.append(function) or compile_it(function)
    )
    z = torch.zeros(8, 3, 6, 6).cuda()
    UniformSNIS(256).bind(ReferenceSet(pixels(100), TorchIndex()).to("cuda")).posterior_mean(
        z, 20.0
    )
    assert called[-2:] == [module.stored_sq_dist, module.stored_deviation]
