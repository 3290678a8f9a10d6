"""Distances to drawn images and their means, in place on a GPU: against float64, and what they cost there."""

import importlib.util
import warnings

import pytest
import torch

from lit_knn.estimators import KNN, STF, MonteCarlo, SubspaceKNN, UniformSNIS
from lit_knn.estimators.drawn_images import InPlace
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet, ShardedReferenceSet, gathered_ops
from lit_knn.reference.gathered import fuses, gathered_mean, gathered_sq_dist
from tests.toys import noisy, pixels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
N, B, n = 60, 5, 9


def vectors(seed=0):
    return torch.randn(N, 2, 4, 6, generator=torch.Generator().manual_seed(seed))


SETS = {
    "pixels": lambda: ReferenceSet(pixels(N)),
    "mirrored pixels": lambda: ReferenceSet(pixels(N), hflip=True),
    "vectors": lambda: ReferenceSet(vectors().flatten(1)),
    "mirrored floats": lambda: ReferenceSet(vectors(), hflip=True),
    "not contiguous": lambda: ReferenceSet(pixels(N).permute(0, 2, 3, 1), hflip=True),
}


def drawn(reference):
    """Ids, one of them below 0; counts of used places; weights with those of a source first; latents; sources."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(reference.N, (B, n), generator=generator)
    z = noisy(reference.gather(ids[:, 0]), 0.1)
    ids[1, 1] = -1
    used = torch.tensor([n, 4, 1, 7, n])
    there = (ids >= 0) & (torch.arange(n) < used[:, None])
    weights = torch.rand(B, 1 + n, generator=generator, dtype=torch.float64)
    weights[:, 1:] *= there
    source = torch.randn(B, *reference.shape, generator=generator)
    return ids, used, weights / weights.sum(1, keepdim=True), z, source


def enumerated(reference, ids, used, weights, z, source):
    """Distances, inf where no image is, and the mean, in float64, by definition."""
    x = torch.cat([source[:, None], reference.gather(ids.clamp(min=0))], 1).double().flatten(2)
    gone = (ids < 0) | (torch.arange(n) >= used[:, None])
    sq_dist = (x - z.double().flatten(1)[:, None]).square().sum(2)
    sq_dist[:, 1:][gone] = torch.inf
    return sq_dist, torch.einsum("bn,bnd->bd", weights, x).view(z.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SETS)
def test_distances_and_means_equal_enumerated_ones(name, device):
    host, reference = SETS[name](), SETS[name]().to(device)
    ids, used, weights, z, source = drawn(host)
    sq_dist, mean = enumerated(host, ids, used, weights, z, source)
    ids, used, weights, z, source = (part.to(device) for part in (ids, used, weights, z, source))
    found = gathered_sq_dist(reference, ids, z, used, source).cpu()
    torch.testing.assert_close(found, sq_dist, rtol=2e-6, atol=0)
    found = gathered_sq_dist(reference, ids, z, used).cpu()
    torch.testing.assert_close(found, sq_dist[:, 1:], rtol=2e-6, atol=0)
    found = gathered_mean(reference, ids, weights, used, source).cpu()
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETS)
def test_means_without_a_source_equal_enumerated_ones(name):
    host, reference = SETS[name](), SETS[name]().to("cuda")
    ids, used, weights, z, source = drawn(host)
    weights[:, 0] = 0
    weights /= weights.sum(1, keepdim=True)
    _, mean = enumerated(host, ids, used, weights, z, source)
    found = gathered_mean(reference, ids.cuda(), weights[:, 1:].cuda(), used.cuda()).cpu()
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_deviations_from_a_centre_take_any_weights():
    host, reference = SETS["mirrored floats"](), SETS["mirrored floats"]().to("cuda")
    ids, used, weights, centre, source = drawn(host)
    weights *= torch.tensor([1.0, 0.3, 5.0, 0.0, 1e-200])[:, None]
    _, total = enumerated(host, ids, used, weights, centre, source)
    expected = total - weights.sum(1)[:, None, None, None] * centre
    images = InPlace(reference, ids.cuda(), used.cuda(), source.cuda())
    found = images.deviation(weights.cuda(), centre.double().cuda()).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(found[4] / 1e-200, expected[4] / 1e-200, rtol=0, atol=5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("hflip", [False, True])
def test_no_rows_have_no_distances_and_no_means(hflip):
    reference = ReferenceSet(pixels(N), hflip=hflip).to("cuda")
    ids = torch.zeros(0, n, dtype=torch.long, device="cuda")
    assert gathered_sq_dist(reference, ids, torch.zeros(0, *reference.shape, device="cuda")).shape == (0, n)
    assert gathered_mean(reference, ids, ids.double()).shape == (0, *reference.shape)


@pytest.mark.gpu
def test_the_source_alone_is_its_own_mean():
    reference, source = SETS["pixels"]().to("cuda"), torch.randn(B, 3, 6, 6).cuda()
    none, one = torch.empty(B, 0, dtype=torch.long).cuda(), torch.ones(B, 1, dtype=torch.float64).cuda()
    assert torch.equal(gathered_mean(reference, none, one, source=source).cpu(), source.double().cpu())
    assert gathered_sq_dist(reference, none, source, source=source).cpu().tolist() == [[0.0]] * B


@pytest.mark.gpu
@pytest.mark.parametrize("t", [0.002, 0.5, 80.0])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_estimates_from_all_images_equal_the_enumerated_mean(t, hflip, dtype):
    # Without repetition, n = N draws are all images, most of them unused at small t.
    reference = ReferenceSet(pixels(N), TorchIndex(), hflip=hflip)
    x = reference.gather(torch.arange(reference.N)).double().flatten(1)
    z = noisy(reference.gather(torch.arange(B)), t).to(dtype)
    weights = torch.softmax(-torch.cdist(z.double().flatten(1), x).square() / (2 * t**2), 1)
    estimator = SubspaceKNN(r=40, n=reference.N).bind(reference.to("cuda"))
    found = estimator.posterior_mean(z.cuda(), t).cpu().double().flatten(1)
    torch.testing.assert_close(found, weights @ x, rtol=0, atol=1e-3 if dtype == torch.float16 else 3e-5)
    certificate = estimator.certified_mean(z.cuda(), t)
    torch.testing.assert_close(certificate.largest_weight.cpu(), weights.amax(1), rtol=1e-3, atol=0)
    # Nothing was left to chance.
    assert certificate.sq_error.max() <= 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("include", [True, False])
def test_the_certificate_of_uniform_draws_is_that_of_gathered_images(include, every_id):
    reference, t = ReferenceSet(pixels(N)), torch.tensor([0.3, 1.0, 3.0, 10.0, 80.0])
    x = reference.gather(torch.arange(B))
    z = noisy(x, t)
    source = x if include else None
    with every_id(torch.arange(B * (n - include)).view(B, -1) % N):
        expected = STF(n=n).bind(reference).certified_mean(z, t, source)
        placed = None if source is None else source.cuda()
        found = STF(n=n).bind(reference.to("cuda")).certified_mean(z.cuda(), t.cuda(), placed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def every_id(monkeypatch):
    """`with every_id(ids):` uniform draws are `ids`, on a CPU and on a GPU, whose random numbers differ."""
    from contextlib import contextmanager

    @contextmanager
    def block(ids):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randint", lambda *_, device, **__: ids.to(device))
            yield

    return block


@pytest.mark.gpu
def test_a_sharded_set_is_read_in_place_too():
    whole, t = SETS["mirrored pixels"](), 2.0
    z = noisy(whole.gather(torch.arange(B)), t)
    sharded = ShardedReferenceSet(pixels(N), TorchIndex(), hflip=True).to("cuda")
    assert fuses(sharded) == fuses(whole.to("cuda"))
    for make in (lambda: UniformSNIS(n=n), lambda: KNN(k=N, n=n)):
        means = []
        for reference in (sharded, ReferenceSet(pixels(N), TorchIndex(), hflip=True).to("cuda")):
            generator = torch.Generator("cuda").manual_seed(0)
            means.append(make().bind(reference).posterior_mean(z.cuda(), t, generator=generator).cpu())
        torch.testing.assert_close(*means, rtol=0, atol=1e-6)


# Most operations of one call, checks of the input and mirror images included.
BUDGETS = {
    "UniformSNIS": (lambda: UniformSNIS(n=256), 37),
    "STF": (lambda: STF(n=256), 43),
    "MonteCarlo": (lambda: MonteCarlo(n=256), 82),
    "KNN": (lambda: KNN(k=64, n=256), 182),
}


@needs_triton
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_call_waits_once_and_reads_each_drawn_image_twice(stand_in, name, hflip):
    make, operations = BUDGETS[name]
    reference = ReferenceSet(pixels(100), TorchIndex(), hflip=hflip).to("cuda")
    z = noisy(reference.gather(torch.arange(8).cuda()).cpu(), 20.0).cuda()
    source, t = z.clone(), torch.full((8,), 20.0, dtype=torch.float64).cuda()
    estimator = make().bind(reference)
    estimator.posterior_mean(z, t, source)
    with stand_in.record() as seen:
        estimator.posterior_mean(z, t, source)
    # The one wait is the check of the input.
    assert seen.syncs <= 1, seen.report()
    assert seen.ops <= operations, seen.report()
    assert seen.op_names["lit_knn::gathered_mean"] == 1
    if name in ("UniformSNIS", "STF"):
        # The stand-in counts the whole set for each of the two operations, but the kernels read the drawn images.
        drawn_bytes = 2 * 8 * 256 * reference.d
        moved = seen.bytes - 2 * reference.images.numel() + drawn_bytes
        assert moved <= 4 * 8 * 256 * reference.d, (moved, seen.report())


class Planted:
    """Makes an operation compute something else while a test runs."""

    def __init__(self, operation, plain, planted):
        self.operation, self.plain, self.planted = operation, plain, planted

    def __enter__(self):
        self.operation.register_kernel("cpu")(self.planted)

    def __exit__(self, *_):
        self.operation.register_kernel("cpu")(self.plain)


def doubled(plain):
    return lambda *arguments: 2 * plain(*arguments)


def broken(*_):
    raise RuntimeError("ptxas fatal: no such GPU\nmore")


@needs_triton
@pytest.mark.parametrize(
    ("name", "plant", "told", "side"),
    [
        ("sq_dist", doubled, "give wrong distances", 5),
        ("mean", doubled, "give a wrong mean", 7),
        ("sq_dist", lambda _: broken, "failed .RuntimeError: ptxas fatal: no such GPU", 9),
        ("mean", lambda _: broken, "failed .RuntimeError: ptxas fatal: no such GPU", 11),
    ],
)
def test_kernels_that_fail_or_are_wrong_are_told_and_not_used(stand_in, name, plant, told, side):
    # Each kind of images is tried once per process, so each case has images of its own size.
    plain = getattr(gathered_ops, f"plain_{name}")
    host = ReferenceSet(pixels(N, (3, side, side)))
    z = noisy(host.gather(torch.arange(B)), 3.0)
    ids = torch.randint(N, (B, n), generator=torch.Generator().manual_seed(1))
    expected = gathered_sq_dist(host, ids, z)
    reference = ReferenceSet(pixels(N, (3, side, side))).to("cuda")
    with Planted(getattr(gathered_ops, name), plain, plant(plain)):
        with pytest.warns(UserWarning, match=f"Triton's kernels {told}.*PyTorch gathers the drawn images"):
            estimator = UniformSNIS(n=n).bind(reference)
        assert not fuses(reference)
        assert torch.equal(gathered_sq_dist(reference, ids.cuda(), z.cuda()).cpu(), expected)
        with stand_in.record() as seen:
            estimator.posterior_mean(z.cuda(), 3.0)
    assert not any(op.startswith("lit_knn::") for op in seen.op_names)


def test_a_gpu_without_triton_gathers_and_says_so(stand_in, monkeypatch):
    monkeypatch.setattr(gathered_ops, "has_triton", lambda: False)
    reference = ReferenceSet(pixels(N, (3, 13, 13))).to("cuda")
    with pytest.warns(UserWarning, match="Triton is not installed"):
        estimator = UniformSNIS(n=n).bind(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        with stand_in.record() as seen:
            estimator.posterior_mean(torch.zeros(2, 3, 13, 13).cuda(), 3.0)
    assert seen.op_names["index_select"] == 1


@pytest.mark.parametrize("counted", [False, True])
def test_pytorch_knows_the_operations(counted):
    reference = SETS["mirrored pixels"]()
    ids, used, weights, z, source = drawn(reference)
    ids, used = ids.clamp(min=0), used if counted else None
    images, width = reference.images.flatten(1), reference.shape[-1]
    ops = torch.ops.lit_knn
    torch.library.opcheck(ops.gathered_sq_dist.default, (images, ids, used, z.flatten(1), width))
    flat = source.flatten(1) if counted else None
    weights = weights if counted else weights[:, 1:]
    torch.library.opcheck(ops.gathered_mean.default, (images, ids, used, weights, flat, width))


def test_pieces_of_bounded_memory_give_the_same(monkeypatch):
    reference = SETS["mirrored floats"]()
    ids, used, weights, z, source = drawn(reference)
    expected = enumerated(reference, ids, used, weights, z, source)
    # Room for three images at a time, which splits the places of each row.
    monkeypatch.setattr(gathered_ops, "work_bytes", lambda device: 3 * 4 * reference.d)
    found = gathered_sq_dist(reference, ids, z, used, source), gathered_mean(reference, ids, weights, used, source)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)
