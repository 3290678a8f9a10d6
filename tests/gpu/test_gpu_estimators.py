"""Every estimator and index on a GPU, or on its stand-in, is as near to the enumerated result as on the CPU."""

import copy
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import DrawingEstimator, Exact, Switched, Wiener
from lit_knn.index import SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.theory.warp import Warp
from tests.any_data import all_images, enumerated_mean
from tests.every_estimator import every_class_estimator, every_estimator
from tests.pretend_cuda import PretendCuda, active, world_of_nccl
from tests.ranks import run_ranks
from tests.sharded_probe import ESTIMATORS, images, shard_of
from tests.sharded_probe import latents as latents_of
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


def seeded(device="cuda"):
    return keyed_generator(device, 1)


@pytest.fixture(autouse=True)
def _default_streams_stay():
    """All random numbers come from the generator that is given."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


# The stand-in makes its many operations slow, and floats show that they run on a GPU.
LONG = "pca_locality"


def but_long(name, kind="pixels"):
    return pytest.param(
        name, kind, marks=pytest.mark.slow if (name, kind) == (LONG, "pixels") else ()
    )


@pytest.mark.parametrize(
    ("name", "kind"), [but_long(name, kind) for name in MAKERS for kind in SETS]
)
def test_bound_estimator_moves_with_its_set_equally_good(name, kind):
    reference = SETS[kind]()
    estimator, (z, x), own_t = MAKERS[name]().bind(reference), latents(reference), T.cuda()
    expected, theirs = enumerated_mean(reference, z, T), (z, T, x, seeded("cpu"))
    most = FACTOR * error(estimator.posterior_mean(*theirs), expected) + FLOOR
    drawing = isinstance(estimator, DrawingEstimator)
    sq_error = (
        estimator.certified_mean(z, T, x, seeded("cpu")).sq_error.mean().item() if drawing else 0.0
    )

    reference.to(torch.device("cuda"))
    stream = torch.cuda.get_rng_state()
    for own in (estimator, copy.deepcopy(estimator)):
        mean = own.posterior_mean(z.cuda(), own_t, x.cuda(), seeded())
        assert (mean.device, mean.dtype, mean.shape) == (torch.device("cuda", 0), z.dtype, z.shape)
        assert error(mean, expected) <= most
    score = estimator.score(z.cuda(), own_t, x.cuda(), seeded())
    # Eq. 5 (eq:clean_score), solved for the mean.
    told = score.cpu().double() * T.reshape(-1, 1, 1, 1) ** 2 + z
    torch.testing.assert_close(told, mean.cpu().double(), atol=1e-4, rtol=0)
    for rows in (1, 0):
        few = estimator.posterior_mean(z[:rows].cuda(), 2.0, x[:rows].cuda(), seeded())
        assert (few.is_cuda, few.shape) == (True, z[:rows].shape)
    if drawing:
        certificate = estimator.certified_mean(z.cuda(), own_t, x.cuda(), seeded())
        assert all(part.is_cuda for part in certificate)
        assert error(certificate.mean, expected) <= most
        assert certificate.sq_error.mean().item() <= FACTOR * sq_error + FLOOR
    assert torch.equal(torch.cuda.get_rng_state(), stream)

    reference.to(torch.device("cpu"))
    # the last level on the GPU
    assert not estimator.posterior_mean(z[:1], 2.0, x[:1], seeded("cpu")).is_cuda
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
    mean = ours.warped_mean(
        z.cuda(), T.cuda(), Warp(*(part.cuda() for part in warp)), x.cuda(), seeded()
    )
    assert mean.is_cuda
    assert error(mean, exact) <= most


@pytest.mark.parametrize(("name", "kind"), [but_long(name) for name in CLASS_MAKERS])
def test_means_of_classes_are_as_good_as_on_the_cpu(name, kind):
    reference, labels = SETS[kind](), LABELS[:B]
    z, x = latents(reference)
    expected = enumerate_class_mean(reference, z, T, labels)
    theirs = CLASS_MAKERS[name]().bind(reference).posterior_mean(z, T, x, seeded("cpu"), labels)
    ours = CLASS_MAKERS[name]().bind(SETS[kind]().to(torch.device("cuda")))
    # Labels may also be on the host.
    for own_labels in (labels.cuda(), labels):
        mean = ours.posterior_mean(z.cuda(), T.cuda(), x.cuda(), seeded(), own_labels)
        assert mean.is_cuda
        assert error(mean, expected) <= FACTOR * error(theirs, expected) + FLOOR


def test_the_exact_mean_at_any_noise_is_finite():
    reference = SETS["pixels"]().to(torch.device("cuda"))
    mean = (
        Exact()
        .bind(reference)
        .posterior_mean(torch.zeros(1, *reference.shape, device="cuda"), 1e30)
    )
    torch.testing.assert_close(
        mean.cpu().flatten(), reference.mean().cpu().float(), atol=1e-6, rtol=0
    )


def test_latents_on_another_device_are_refused():
    reference = SETS["pixels"]()
    z, _ = latents(reference)
    with pytest.raises(InputError, match="z is on cpu"):
        MAKERS["knn"]().bind(reference.to(torch.device("cuda"))).posterior_mean(z, 2.0)


@pytest.mark.parametrize(
    "make", [TorchIndex, lambda: TorchIndex("float32"), lambda: SubspaceIndex(30, "float32")]
)
@pytest.mark.parametrize("built_before", [True, False])
def test_index_moved_or_built_on_gpu_finds_enumerated_neighbours(make, built_before):
    reference = ReferenceSet(pixels(200), make(), hflip=True)
    x = all_images(reference)
    z = noisy(x[:B], 1.0)
    every = (z[:, None] - x).flatten(2).double().square().sum(2)
    nearest = every.topk(5, largest=False).values
    if built_before:
        reference.build_index(5)
    sq_dist, ids = reference.to(torch.device("cuda")).search(z.cuda(), 5)
    assert sq_dist.is_cuda
    # Rounded products may swap neighbours of nearly equal distance.
    torch.testing.assert_close(every.gather(1, ids.cpu()), nearest, rtol=2e-2, atol=0)
    torch.testing.assert_close(sq_dist.cpu().double(), nearest, rtol=2e-2, atol=0)
    assert reference.locate(x[7:9].cuda()).tolist() == [7, 8]


# Shards. A rank is on its own GPU, or on its stand-in.

# On a GPU both parts of a switched estimator estimate all rows, so random parts would draw other numbers than on a CPU.
ON_GPUS = {**ESTIMATORS, "Switched": lambda: Switched(Wiener(4), Exact(), 0.5)}


def answers(reference, setting, rank, device):
    """Return what the rank finds and estimates, by name; rank 1 has no latents."""
    z, x = (part.to(device) for part in latents_of(setting, rank))
    sq_dist, ids = reference.search(latents_of(setting, 0)[0].to(device), 7)
    everything = torch.cat([chunk for _, chunk in reference.chunks(10)])
    means = {
        name: make()
        .bind(reference)
        .posterior_mean(z, 2.0, x, keyed_generator(device.type, rank, 7))
        for name, make in ON_GPUS.items()
    }
    located = reference.locate(everything[5:9].to(device))
    found = {
        "sq_dist": sq_dist,
        "ids": ids,
        "images": everything,
        "located": located,
        "mean": reference.mean(),
    }
    return {name: part.cpu() for name, part in (means | found).items()}


def main(rank, world_size, folder, how):
    """Answer as one rank with a shard."""
    with ExitStack() as stack:
        real = torch.cuda.is_available()
        if not real:
            stack.enter_context(PretendCuda())
        device = torch.device("cuda", rank if real else 0)
        torch.cuda.set_device(device)
        store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
        dist.init_process_group("nccl" if real else "gloo", **store)
        stack.callback(dist.destroy_process_group)
        if not real:
            stack.enter_context(world_of_nccl())
        report = {}
        for setting in ("pixels", "mirrored"):
            reference = shard_of(setting, rank, world_size, TorchIndex("float32")).to(device)
            report[setting] = answers(reference, setting, rank, device)
            report[setting]["fingerprint"] = reference.fingerprint()
        torch.save(report, folder / f"rank_{rank}.pt")


def test_shards_on_two_gpus_are_the_whole_set_on_the_cpu(tmp_path):
    if not active and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs one GPU for each rank")
    codes, _, errors = run_ranks("tests.gpu.test_gpu_estimators", tmp_path, "nccl", 2)
    assert codes == [0, 0], errors
    reports = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    for setting in ("pixels", "mirrored"):
        whole = ReferenceSet(images(setting), TorchIndex("float32"), hflip=setting == "mirrored")
        for rank, report in enumerate(reports):
            found = report[setting]
            for name, expected in answers(whole, setting, rank, torch.device("cpu")).items():
                # A GPU draws other numbers than a CPU and its stand-in, so that estimators without draws alone agree.
                if active or name not in ON_GPUS or name in ("Exact", "Switched", "Wiener"):
                    torch.testing.assert_close(
                        found[name], expected, rtol=1e-3, atol=1e-3, msg=f"{setting} {name}"
                    )
                assert found[name].shape == expected.shape
        assert len({report[setting]["fingerprint"] for report in reports}) == 1
