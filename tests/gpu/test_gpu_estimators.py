"""Every estimator on a GPU, or on its stand-in, is as near to the enumerated posterior mean as on the CPU."""

import copy

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import DrawingEstimator as CertifiedEstimator
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp
from tests.any_data import enumerated_mean
from tests.every_estimator import every_class_estimator, every_estimator
from tests.toys import all_warped, enumerate_class_mean, low_rank_vectors, noisy, pixels

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* the default ")]

B = 24
T = torch.logspace(-1, 1.5, B, dtype=torch.float64)
OPTIONS = {"k": 40, "n": 16, "r": 8, "max_n": 60, "coarse": 4, "candidates": 40}
SETS = {
    "pixels": lambda: ReferenceSet(pixels(80), TorchIndex()),
    "mirrored": lambda: ReferenceSet(pixels(60), hflip=True),
    "floats": lambda: ReferenceSet(low_rank_vectors(70).reshape(70, 3, 2, 2)),
}
MAKERS = every_estimator(**OPTIONS)
# A device's own random numbers and number types change an error by chance and by rounding.
FACTOR, FLOOR = 4, 1e-6


def on(device, make, kind):
    reference = SETS[kind]().to(torch.device(device))
    estimator = make()
    return (estimator.bind(reference) if estimator.needs_reference else estimator), reference


def latents(reference):
    x = reference.gather(torch.arange(B, device=reference.device)).cpu()
    return noisy(x, T), x


def error(mean, expected):
    return (mean.cpu().double() - expected).square().mean().item()


@pytest.fixture(autouse=True)
def _default_streams_stay():
    """All random numbers come from the generator that is given."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


# This analytic model takes half a minute on the stand-in, and one kind of set shows whether it runs on a GPU.
LONG = ("pca_locality",)
NAMES_AND_KINDS = [
    pytest.param(name, kind, marks=pytest.mark.slow if name in LONG and kind != "pixels" else ())
    for name in MAKERS
    for kind in SETS
]


@pytest.mark.parametrize(("name", "kind"), NAMES_AND_KINDS)
def test_posterior_means_are_as_good_as_on_the_cpu(name, kind):
    (ours, reference), (theirs, on_cpu) = (on(device, MAKERS[name], kind) for device in ("cuda", "cpu"))
    few = slice(None, None, 4 if name in LONG else 1)
    (z, x), t = (part[few] for part in latents(on_cpu)), T[few]
    expected = enumerated_mean(on_cpu, z, t)
    stream = torch.cuda.get_rng_state()
    mean = ours.posterior_mean(z.cuda(), t.cuda(), x.cuda(), keyed_generator("cuda", 1))
    assert (mean.device, mean.dtype, mean.shape) == (reference.device, z.dtype, z.shape)
    most = FACTOR * error(theirs.posterior_mean(z, t, x, keyed_generator("cpu", 1)), expected) + FLOOR
    assert error(mean, expected) <= most
    for rows in (slice(0, 1), slice(0, 0)):
        few = ours.posterior_mean(z[rows].cuda(), 2.0, x[rows].cuda(), keyed_generator("cuda", 1))
        assert few.shape == z[rows].shape
        assert few.is_cuda
    if isinstance(ours, CertifiedEstimator):
        certificate = ours.certified_mean(z.cuda(), t.cuda(), x.cuda(), keyed_generator("cuda", 1))
        assert error(certificate.mean, expected) <= most
        assert all(part.is_cuda for part in certificate)
        told = theirs.certified_mean(z, t, x, keyed_generator("cpu", 1)).sq_error
        assert certificate.sq_error.mean().item() <= FACTOR * told.mean().item() + FLOOR
    assert torch.equal(torch.cuda.get_rng_state(), stream)
    score = ours.score(z.cuda(), t.cuda(), x.cuda(), keyed_generator("cuda", 1))
    # Eq. 5 (eq:clean_score), solved for the mean.
    told = score.cpu().double() * t.reshape(-1, *[1] * (z.ndim - 1)) ** 2 + z
    torch.testing.assert_close(told, mean.cpu().double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in MAKERS])
def test_a_set_may_move_after_an_estimator_is_bound(name):
    estimator, reference = on("cpu", MAKERS[name], "pixels")
    z, x = latents(reference)
    expected = enumerated_mean(reference, z, T)
    most = FACTOR * error(estimator.posterior_mean(z, T, x, keyed_generator("cpu", 1)), expected) + FLOOR
    for device in ("cuda", "cuda", "cpu", "cuda"):
        reference.to(torch.device(device))
        copied = copy.deepcopy(estimator)
        arguments = (z.to(device), T.to(device), x.to(device), keyed_generator(device, 1))
        for own in (estimator, copied):
            assert error(own.posterior_mean(*arguments), expected) <= most


def moved(warp, device):
    return Warp(*(part.to(device) for part in warp))


@pytest.mark.parametrize("name", [name for name, make in MAKERS.items() if make().can_warp])
def test_means_of_warped_images_are_as_good_as_on_the_cpu(name):
    (ours, _), (theirs, on_cpu) = (on(device, MAKERS[name], "mirrored") for device in ("cuda", "cpu"))
    x = latents(on_cpu)[1]
    augmented = all_warped(x)
    z = noisy(augmented.images, T)
    on_gpu = moved(augmented.warp, "cuda")
    exact = MAKERS["exact"]().bind(on_cpu).warped_mean(z, T, augmented.warp, x).double()
    mean = ours.warped_mean(z.cuda(), T.cuda(), on_gpu, x.cuda(), keyed_generator("cuda", 1))
    assert mean.is_cuda
    most = FACTOR * error(theirs.warped_mean(z, T, augmented.warp, x, keyed_generator("cpu", 1)), exact) + FLOOR
    assert error(mean, exact) <= most


@pytest.mark.parametrize("name", MAKERS)
def test_arguments_on_another_device_are_refused(name):
    estimator, reference = on("cuda", MAKERS[name], "mirrored")
    z, x = (part[:2].cuda() for part in latents(reference))
    for call, said in (
        (lambda: estimator.posterior_mean(z, 2.0, x.cpu()), "x_source is on cpu, z is on cuda:0"),
        (lambda: estimator.posterior_mean(z, 2.0, x, torch.Generator()), "the generator is on cpu, z is on cuda:0"),
        (lambda: estimator.score(z, 2.0, x, torch.Generator()), "the generator is on cpu, z is on cuda:0"),
        (lambda: estimator.posterior_mean(z.cpu(), 2.0, x), "z is on cpu, the reference set on cuda|z is on cpu"),
    ):
        with pytest.raises(InputError, match=said):
            call()
    if isinstance(estimator, CertifiedEstimator):
        with pytest.raises(InputError, match="the generator is on cpu, z is on cuda:0"):
            estimator.certified_mean(z, 2.0, x, torch.Generator())
    if estimator.can_warp:
        augmented = all_warped(x.cpu())
        with pytest.raises(InputError, match="warp is on cpu, z is on cuda:0"):
            estimator.warped_mean(augmented.images.cuda(), 2.0, augmented.warp, x)


CLASS_MAKERS = every_class_estimator(k=10, n=8, r=4, max_n=10)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CLASS_MAKERS])
def test_means_of_classes_are_as_good_as_on_the_cpu(name):
    def bound(device):
        labels = torch.arange(60) % 3
        reference = ReferenceSet(pixels(60), TorchIndex(), hflip=True, labels=labels).to(torch.device(device))
        return CLASS_MAKERS[name]().bind(reference), reference

    (ours, _), (theirs, on_cpu) = bound("cuda"), bound("cpu")
    z, x = latents(on_cpu)
    labels = on_cpu.labels[:B]
    expected = enumerate_class_mean(on_cpu, z, T, labels)
    mean = ours.posterior_mean(z.cuda(), T.cuda(), x.cuda(), keyed_generator("cuda", 1), labels.cuda())
    assert mean.is_cuda
    most = FACTOR * error(theirs.posterior_mean(z, T, x, keyed_generator("cpu", 1), labels), expected) + FLOOR
    assert error(mean, expected) <= most
    for few in (1, 0):
        # Labels may also be on the host.
        own = (z[:few].cuda(), T[:few].cuda(), x[:few].cuda(), keyed_generator("cuda", 1), labels[:few])
        assert ours.posterior_mean(*own).shape == z[:few].shape


INDEXES = {
    "TorchIndex": TorchIndex,
    "TorchIndex, float32": lambda: TorchIndex("float32"),
    "SubspaceIndex": lambda: SubspaceIndex(30, "float32"),
    "FaissIndex, Flat": lambda: FaissIndex("Flat"),
    "FaissIndex, lists": lambda: FaissIndex("IVF3,Flat", nprobe=3),
}


@pytest.mark.parametrize("moment", ["before it is built", "after it is built"])
@pytest.mark.parametrize("name", INDEXES)
def test_an_index_finds_the_enumerated_neighbours(name, moment):
    images = pixels(200)
    reference = ReferenceSet(images, INDEXES[name](), hflip=True)
    z = noisy(reference.gather(torch.arange(B)), 1.0)
    if moment == "after it is built":
        reference.build_index(5)
    reference.to(torch.device("cuda"))
    sq_dist, ids = reference.search(z.cuda(), 5)
    assert sq_dist.is_cuda
    assert ids.is_cuda
    x = reference.gather(torch.arange(reference.N, device="cuda")).cpu()
    every = (z[:, None] - x).flatten(2).double().square().sum(2)
    nearest = every.topk(5, largest=False)
    # Rounded products may swap neighbours of nearly equal distance.
    torch.testing.assert_close(every.gather(1, ids.cpu()), nearest.values, rtol=2e-2, atol=0)
    torch.testing.assert_close(sq_dist.cpu().double(), nearest.values, rtol=2e-2, atol=0)
    at = reference.locate(x[7:9].cuda())
    assert at.is_cuda
    assert at.tolist() == [7, 8]
