"""Every estimator and index on a GPU, or on its stand-in, is as near to the enumerated result as on the CPU."""

import copy

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import DrawingEstimator
from lit_knn.index import SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp
from tests.any_data import enumerated_mean
from tests.every_estimator import every_class_estimator, every_estimator
from tests.toys import all_warped, enumerate_class_mean, low_rank_vectors, noisy, pixels

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* the default ")]

B = 24
T = torch.logspace(-1, 1.5, 4, dtype=torch.float64).repeat(6)
LABELS = torch.arange(60) % 3
SETS = {
    "pixels": lambda: ReferenceSet(pixels(60), hflip=True, labels=LABELS),
    "floats": lambda: ReferenceSet(low_rank_vectors(70).reshape(70, 3, 2, 2)),
}
MAKERS = every_estimator(k=40, n=16, r=8, max_n=60, coarse=4, candidates=40)
CLASS_MAKERS = every_class_estimator(k=10, n=8, r=4, max_n=10)
# A device's own random numbers and number types change an error by chance and by rounding.
FACTOR, FLOOR = 4, 1e-6


def latents(reference):
    x = reference.gather(torch.arange(B))
    return noisy(x, T), x


def error(mean, expected):
    return (mean.cpu().double() - expected).square().mean().item()


def seeded(device):
    return keyed_generator(device, 1)


@pytest.fixture(autouse=True)
def _default_streams_stay():
    """All random numbers come from the generator that is given."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


# The stand-in makes its many operations slow, and floats show that they run on a GPU.
LONG = "pca_locality"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.slow if (name, kind) == (LONG, "pixels") else ())
        for name in MAKERS
        for kind in SETS
    ],
)
def test_a_bound_estimator_moves_with_its_set_and_is_as_good_there(name, kind):
    reference, estimator = SETS[kind](), MAKERS[name]()
    if estimator.needs_reference:
        estimator.bind(reference)
    z, x = latents(reference)
    expected, theirs = enumerated_mean(reference, z, T), (z, T, x, seeded("cpu"))
    most = FACTOR * error(estimator.posterior_mean(*theirs), expected) + FLOOR
    drawing = isinstance(estimator, DrawingEstimator)
    sq_error = estimator.certified_mean(z, T, x, seeded("cpu")).sq_error.mean().item() if drawing else 0.0

    reference.to(torch.device("cuda"))
    stream = torch.cuda.get_rng_state()
    for own in (estimator, copy.deepcopy(estimator)):
        mean = own.posterior_mean(z.cuda(), T.cuda(), x.cuda(), seeded("cuda"))
        assert (mean.device, mean.dtype, mean.shape) == (torch.device("cuda", 0), z.dtype, z.shape)
        assert error(mean, expected) <= most
    score = estimator.score(z.cuda(), T.cuda(), x.cuda(), seeded("cuda"))
    # Eq. 5 (eq:clean_score), solved for the mean.
    told = score.cpu().double() * T.reshape(-1, 1, 1, 1) ** 2 + z
    torch.testing.assert_close(told, mean.cpu().double(), atol=1e-4, rtol=0)
    for rows in (1, 0):
        few = estimator.posterior_mean(z[:rows].cuda(), 2.0, x[:rows].cuda(), seeded("cuda"))
        assert few.is_cuda
        assert few.shape == z[:rows].shape
    if drawing:
        certificate = estimator.certified_mean(z.cuda(), T.cuda(), x.cuda(), seeded("cuda"))
        assert all(part.is_cuda for part in certificate)
        assert error(certificate.mean, expected) <= most
        assert certificate.sq_error.mean().item() <= FACTOR * sq_error + FLOOR
    assert torch.equal(torch.cuda.get_rng_state(), stream)

    reference.to(torch.device("cpu"))
    assert error(estimator.posterior_mean(z, T, x, seeded("cpu")), expected) <= most


@pytest.mark.parametrize("name", [name for name, make in MAKERS.items() if make().can_warp])
def test_means_of_warped_images_are_as_good_as_on_the_cpu(name):
    reference = SETS["pixels"]()
    theirs, x = MAKERS[name]().bind(reference), latents(reference)[1]
    augmented = all_warped(x)
    z, warp = noisy(augmented.images, T), augmented.warp
    exact = MAKERS["exact"]().bind(reference).warped_mean(z, T, warp, x).double()
    most = FACTOR * error(theirs.warped_mean(z, T, warp, x, seeded("cpu")), exact) + FLOOR
    ours = MAKERS[name]().bind(reference.to(torch.device("cuda")))
    on_gpu = Warp(*(part.cuda() for part in warp))
    mean = ours.warped_mean(z.cuda(), T.cuda(), on_gpu, x.cuda(), seeded("cuda"))
    assert mean.is_cuda
    assert error(mean, exact) <= most


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == LONG else ()) for n in CLASS_MAKERS])
def test_means_of_classes_are_as_good_as_on_the_cpu(name):
    reference, labels = SETS["pixels"](), LABELS[:B]
    z, x = latents(reference)
    expected = enumerate_class_mean(reference, z, T, labels)
    theirs = CLASS_MAKERS[name]().bind(reference).posterior_mean(z, T, x, seeded("cpu"), labels)
    ours = CLASS_MAKERS[name]().bind(SETS["pixels"]().to(torch.device("cuda")))
    mean = ours.posterior_mean(z.cuda(), T.cuda(), x.cuda(), seeded("cuda"), labels.cuda())
    assert mean.is_cuda
    assert error(mean, expected) <= FACTOR * error(theirs, expected) + FLOOR
    for few in (1, 0):
        # Labels may also be on the host.
        own = (z[:few].cuda(), T[:few].cuda(), x[:few].cuda(), seeded("cuda"), labels[:few])
        assert ours.posterior_mean(*own).shape == z[:few].shape


@pytest.mark.parametrize("name", ["knn", "one_sample", "exact"])
def test_arguments_on_another_device_are_refused(name):
    estimator, reference = MAKERS[name](), SETS["pixels"]()
    z, x = (part[:2].cuda() for part in latents(reference))
    reference.to(torch.device("cuda"))
    if estimator.needs_reference:
        estimator.bind(reference)
    augmented = all_warped(x.cpu())
    for call, said in (
        (lambda: estimator.posterior_mean(z, 2.0, x.cpu()), "x_source is on cpu, z is on cuda:0"),
        (lambda: estimator.posterior_mean(z, 2.0, x, torch.Generator()), "the generator is on cpu, z is on cuda:0"),
        (lambda: estimator.posterior_mean(z.cpu(), 2.0, x), "z is on cpu"),
        (
            lambda: estimator.warped_mean(augmented.images.cuda(), 2.0, augmented.warp, x),
            "warp is on cpu, z is on cuda",
        ),
    ):
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("make", [TorchIndex, lambda: TorchIndex("float32"), lambda: SubspaceIndex(30, "float32")])
def test_an_index_finds_the_enumerated_neighbours_whether_it_moves_or_is_built_there(make):
    host = ReferenceSet(pixels(200), hflip=True)
    x = host.gather(torch.arange(host.N))
    z = noisy(x[:B], 1.0)
    every = (z[:, None] - x).flatten(2).double().square().sum(2)
    nearest = every.topk(5, largest=False).values
    for built_before in (True, False):
        reference = ReferenceSet(pixels(200), make(), hflip=True)
        if built_before:
            reference.build_index(5)
        reference.to(torch.device("cuda"))
        sq_dist, ids = reference.search(z.cuda(), 5)
        assert sq_dist.is_cuda
        assert ids.is_cuda
        # Rounded products may swap neighbours of nearly equal distance.
        torch.testing.assert_close(every.gather(1, ids.cpu()), nearest, rtol=2e-2, atol=0)
        torch.testing.assert_close(sq_dist.cpu().double(), nearest, rtol=2e-2, atol=0)
        at = reference.locate(x[7:9].cuda())
        assert at.is_cuda
        assert at.tolist() == [7, 8]
