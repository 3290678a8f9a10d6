"""The exact mean by products of digits, in integers and in bfloat16, on the CPU and on a GPU or its stand-in."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_knn.errors import InputError
from lit_knn.estimators import Exact, ExactFloat64, ExactInt8, MonteCarlo
from lit_knn.estimators.digit_sums import digit_sums
from lit_knn.linalg.split import TERMS_PER_SUM, BFloat16Products, Int8Products, products_for
from lit_knn.reference import ReferenceSet, streaming
from lit_knn.theory.posterior import log_posterior, posterior_mean
from tests.toys import noisy, pixels

GPU = torch.device("cuda", 0)
LEVELS = torch.logspace(-2.5, 2, 40, dtype=torch.float64)
KINDS = [BFloat16Products, Int8Products]


def on_gpu(images, **options):
    return ReferenceSet(images.to(GPU), **options)


def all_images(reference):
    return reference.take(torch.arange(reference.N, device=reference.device)).cpu()


def mean_on_gpu(estimator, reference, z, t):
    """The estimate at z and t (B,), given and returned on the CPU."""
    return estimator.bind(reference).posterior_mean(z.to(GPU), t.to(GPU)).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", [1, 50, TERMS_PER_SUM, 2 * TERMS_PER_SUM, 2 * TERMS_PER_SUM + 1])
def test_products_of_digits_are_products(kind, terms):
    generator = torch.Generator().manual_seed(terms)
    rows = 50 * torch.randn(3, terms, generator=generator)
    pixels = torch.randint(256, (5, terms), dtype=torch.uint8, generator=generator)
    codes = pixels.double() - 128
    exact = rows.double() @ codes.T
    scale = rows.double().abs() @ codes.abs().T
    products = kind(1)
    for count in (1, 2, 3):
        digits = products.split(rows, count)
        result = products.multiply(digits.values, products.operand(pixels).T).double()
        result = result if digits.unit is None else result * digits.unit
        # An integer digit has fewer bits for small entries. Beyond float32's 24 bits, digits do not help.
        bound = max(2.0 ** (-8 * count), 2.0**-22) * (16 if kind is Int8Products else 1)
        assert ((result - exact).abs() <= bound * scale).all()
        unit = 1 if digits.unit is None else digits.unit
        torch.testing.assert_close(
            products.total(digits.values.sum(2, dtype=torch.float64)) * unit,
            rows.sum(1, keepdim=True).double(),
            rtol=0,
            atol=bound * scale.max().item(),
        )


class FactorStrides(TorchDispatchMode):
    """Collects the strides of all bfloat16 matrices that are converted, as a CPU does with the factors of products."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "aten._to_copy.default" and args[0].dtype == torch.bfloat16:
            self.found |= set(args[0].stride())
        return func(*args, **(kwargs or {}))


def test_blocks_of_terms_start_where_matrix_units_read_fast():
    products, terms = BFloat16Products(2), 10_008
    digits = products.split(torch.randn(2, terms), 2).values
    with FactorStrides() as strides:
        products.multiply(digits, torch.ones(terms, 8, dtype=torch.bfloat16))
    assert all(stride == 1 or stride % 8 == 0 for stride in strides.found)


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize(("digits", "limit"), [(2, 5e-13), (3, 2e-15)])
def test_each_digit_in_bfloat16_brings_the_error_down(digits, limit, hflip):
    reference = ReferenceSet(pixels(N=400), hflip=hflip)
    z = noisy(all_images(reference)[:40], LEVELS).double()
    mean, log_normaliser = digit_sums(reference, z, LEVELS, BFloat16Products(digits))
    sq_dist = torch.cdist(z.flatten(1), all_images(reference).flatten(1).double()).square()
    assert (mean - posterior_mean(z, all_images(reference), LEVELS)).square().mean() < limit
    expected = torch.logsumexp(-sq_dist / (2 * LEVELS.unsqueeze(1) ** 2), 1)
    torch.testing.assert_close(log_normaliser, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("make", [Exact, ExactInt8, lambda: ExactInt8(3)], ids=["Exact", "ExactInt8", "3 digits"])
def test_the_mean_on_a_gpu_is_that_of_enumeration(make, hflip):
    estimator, reference = make(), on_gpu(pixels(N=403), hflip=hflip)
    z = noisy(all_images(reference)[:40], LEVELS).double()
    error = mean_on_gpu(estimator, reference, z, LEVELS) - posterior_mean(z, all_images(reference), LEVELS)
    assert error.square().flatten(1).mean(1).max() < 1e-9
    assert estimator.type_in_use != "float64"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 4, 4)])
@pytest.mark.parametrize("N", [1, 2, 31, 33, 61])
def test_sizes_that_integer_products_on_a_gpu_refuse_are_padded(N, shape):
    reference = on_gpu(pixels(N=N, shape=shape))
    z = torch.randn(3, *shape, dtype=torch.float64)
    t = torch.tensor([0.5, 1.0, 5.0], dtype=torch.float64)
    for estimator in (ExactInt8(3), Exact()):
        estimate = mean_on_gpu(estimator, reference, z, t)
        torch.testing.assert_close(estimate, posterior_mean(z, all_images(reference), t), rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_groups_and_chunks_make_no_difference_on_a_gpu(monkeypatch):
    reference = on_gpu(pixels(N=300))
    z, t = torch.randn(150, *reference.shape), torch.full((150,), 2.0)
    for estimator in (Exact(), ExactInt8()):
        whole = mean_on_gpu(estimator, reference, z, t)
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "WORK_BYTES", 1000)
            pieces = estimator.posterior_mean(z.to(GPU), t.to(GPU)).cpu()
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("t", [1e-30, 1e-17, 1e17, 1e30])
def test_levels_that_float32_cannot_hold_have_the_limits_of_the_noise_on_a_gpu(t):
    reference = on_gpu(pixels(N=60))
    z = all_images(reference)[:5]
    limit = z if t < 1 else all_images(reference).mean(0).expand_as(z)
    estimate = mean_on_gpu(Exact(), reference, z, torch.full((5,), t, dtype=torch.float64))
    torch.testing.assert_close(estimate, limit, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_more_copies_of_an_image_than_are_recomputed_on_a_gpu():
    images = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8)
    images[:50] = 255
    reference = on_gpu(images)
    x = all_images(reference)[:8]
    for t in (5e-4, 0.002):
        z = x + t * torch.randn(x.shape)
        torch.testing.assert_close(mean_on_gpu(Exact(), reference, z, torch.full((8,), t)), x)


@pytest.mark.gpu
def test_an_estimator_measures_again_after_its_images_have_moved():
    reference = ReferenceSet(pixels(N=200))
    exact, yardstick = Exact().bind(reference), MonteCarlo(5).bind(reference)
    on_cpu = exact.type_in_use
    z = torch.randn(4, *reference.shape)
    before = exact.posterior_mean(z, 3.0)
    reference.to(GPU)
    after = exact.posterior_mean(z.to(GPU), 3.0).cpu()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    assert exact.type_in_use == products_for(reference.device).name
    assert yardstick.posterior_mean(z.to(GPU), 3.0).shape == z.shape
    reference.to("cpu")
    assert torch.equal(exact.posterior_mean(z, 3.0), before)
    assert exact.type_in_use == on_cpu


@pytest.mark.gpu
def test_floats_are_summed_in_float64_on_a_gpu_and_refused_by_int8():
    reference = on_gpu(torch.randn(40, 6))
    z = torch.randn(5, 6, device=GPU)
    exact = Exact().bind(reference)
    assert exact.type_in_use == "float64"
    assert torch.equal(exact.posterior_mean(z, 1.0), ExactFloat64().bind(reference).posterior_mean(z, 1.0))
    with pytest.raises(InputError, match=r"ExactInt8: needs uint8 images .* got torch\.float32 on cuda"):
        ExactInt8().bind(reference)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 0), None),
        ((7, 5), None),
        ((8, 0), "bfloat16"),
        ((8, 6), "int8"),
        ((8, 9), "int8"),
        ((9, 0), "bfloat16"),
        ((10, 0), "bfloat16"),
        ((12, 0), "int8"),
    ],
)
def test_the_card_decides_on_the_number_type(stand_in, monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = products_for(GPU)
    assert (found and found.name) == name
    estimator = Exact().bind(on_gpu(pixels(N=80)))
    assert estimator.type_in_use == (name or "float64")
    if name is None:
        with pytest.raises(InputError, match="ExactInt8: needs uint8 images and a device that multiplies int8"):
            ExactInt8().bind(on_gpu(pixels(N=80)))


@pytest.mark.parametrize(("make", "most"), [(Exact, 75), (ExactInt8, 117), (lambda: MonteCarlo(16), 53)])
def test_one_call_waits_once_and_launches_equally_many_operations_for_more_images(stand_in, make, most):
    counts = []
    # The last size is the paper's batch, of whose nearest images no float copy fits in the usual work arrays.
    for N, B, shape in ((104, 20, (3, 8, 8)), (904, 60, (3, 8, 8)), (200, 1024, (3, 32, 32))):
        reference = on_gpu(pixels(N=N, shape=shape))
        estimator = make().bind(reference)
        z, t = torch.randn(B, *reference.shape, device=GPU), torch.full((B,), 5.0, device=GPU)
        with stand_in.record() as seen:
            estimator.posterior_mean(z, t)
        # The only one is the check of the input.
        assert seen.syncs == 1, seen.report()
        counts.append(seen.ops)
    assert len(set(counts)) == 1
    assert counts[0] <= most, seen.report()


@pytest.mark.parametrize("N", [4096, 6144])
def test_the_exact_mean_passes_over_the_scores_few_times(stand_in, N):
    reference = on_gpu(pixels(N=N, shape=(3, 16, 16)))
    estimator = Exact().bind(reference)
    z, t = torch.randn(256, *reference.shape, device=GPU), torch.full((256,), 5.0, device=GPU)
    with stand_in.record() as seen:
        estimator.posterior_mean(z, t)
    codes, scores, latents = N * reference.d, 4 * len(z) * N, z.nbytes
    # Both products read the codes in 8 bits, write them in 16 and read these; two operations read the nearest images,
    # for which the stand-in counts all codes. Each block of 2,048 terms of the second product writes two sums.
    blocks = N // TERMS_PER_SUM
    assert seen.bytes <= 2 * 5 * codes + 2 * codes + 25 * scores + (4 * blocks + 80) * latents, seen.report()


@pytest.mark.gpu
@pytest.mark.parametrize("t", [0.05, 0.6, 2.0])
def test_monte_carlo_draws_from_the_posterior_on_a_gpu(t):
    reference = on_gpu(pixels(N=50))
    z = noisy(all_images(reference)[:2], t).double()
    estimator = MonteCarlo(20_000).bind(reference)
    levels = torch.full((2,), t, dtype=torch.float64, device=GPU)
    ids = estimator.posterior_ids(z.to(GPU), levels, torch.Generator(GPU).manual_seed(0)).cpu()
    sq_dist = torch.cdist(z.flatten(1), all_images(reference).flatten(1).double()).square()
    expected = log_posterior(sq_dist, t).exp()
    for row, probabilities in zip(ids, expected, strict=True):
        frequencies = torch.bincount(row, minlength=50) / len(row)
        # Five standard deviations of a frequency are at most 0.018.
        assert (frequencies - probabilities).abs().max() < 0.018


def test_neither_estimator_multiplies_in_float64_with_all_images(stand_in):
    reference = on_gpu(pixels(N=2000))
    z, t = torch.randn(8, *reference.shape, device=GPU), torch.full((8,), 1.0, device=GPU, dtype=torch.float64)
    estimators = Exact().bind(reference), MonteCarlo(4).bind(reference)
    whole = 2 * len(z) * reference.N * reference.d
    with stand_in.record() as seen:
        estimators[0].posterior_mean(z, t)
        estimators[1].posterior_ids(z, t, None)
    assert seen.flops["bfloat16"] >= 3 * whole
    assert seen.flops["float64"] < whole / 10


def test_plans_tell_what_is_held_on_a_gpu():
    for estimator in (Exact(), MonteCarlo()):
        held = dict(estimator.holds(50_000, 3072, True, GPU).arrays)
        assert held == {"norms of the images": 200_000, "scores of 1024 latents": 4 * 1024 * 50_000}
        assert dict(estimator.holds(50_000, 3072, False, GPU).arrays) == {}
        # A group has 2 GiB of scores at most, but 64 latents at least.
        scores = [estimator.holds(N, 3072, True, GPU).arrays["scores of 1024 latents"] for N in (10**6, 10**7)]
        assert scores == [2**31, 64 * 4 * 10**7]
