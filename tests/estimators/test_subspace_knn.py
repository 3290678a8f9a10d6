"""The subspace estimator against enumeration, its limits, and its certificate against its error."""

import pytest
import torch

from lit_knn.estimators import KNN, SubspaceKNN
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import components_of
from lit_knn.theory import stratified
from lit_knn.theory.posterior import posterior_mean
from tests.toys import low_rank_vectors, noisy, pixels

N, D, R = 60, 12, 4


def squared_error(estimator, z, t, mu, repeats=400):
    generator = torch.Generator().manual_seed(5)
    z, t = z.repeat_interleave(repeats, 0), t
    error = estimator.posterior_mean(z, t, generator=generator).double() - mu.repeat_interleave(
        repeats, 0
    )
    return error.square().sum(1).reshape(-1, repeats).mean(1)


def test_all_components_make_it_exact_with_few_images():
    # Proposal and posterior are then equal, and the control variate is the whole x.
    x, t = low_rank_vectors(), torch.tensor([0.02, 0.5, 1.0, 3.0, 50.0]).repeat(12)
    z = noisy(x, t)
    mean = SubspaceKNN(r=D, n=8, compute="float32").bind(ReferenceSet(x)).posterior_mean(z, t)
    torch.testing.assert_close(mean.double(), posterior_mean(z, x, t), rtol=1e-4, atol=1e-4)


def test_error_falls_to_zero_as_n_grows_to_N_and_as_r_grows_to_d():
    x = low_rank_vectors()
    reference, z, t = ReferenceSet(x), noisy(x[:12], 1.0), 1.0
    mu = posterior_mean(z, x, t)
    # Below this error, means differ by four units in the last place of float32, and processors round in unlike ways.
    rounding = (4 * torch.finfo(torch.float32).eps) ** 2 * mu.square().sum(1).mean().item()

    def mse(r, n):
        error = (
            squared_error(SubspaceKNN(r=r, n=n, compute="float32").bind(reference), z, t, mu)
            .mean()
            .item()
        )
        return max(error, rounding)

    by_n = [mse(R, n) for n in (4, 10, 25, 55, 60)]
    assert by_n == sorted(by_n, reverse=True)
    assert by_n[-1] < 1e-9 < by_n[0] / 1e5
    by_r = [mse(r, 10) for r in (1, 4, 8, 11, 12)]
    assert by_r == sorted(by_r, reverse=True)


@pytest.fixture
def keep(monkeypatch):
    """`keep(m)`: m images are kept, and the others are drawn, whatever their probabilities."""
    return lambda m: monkeypatch.setattr(
        stratified, "num_sure", lambda q: q.new_full((len(q),), m, dtype=torch.long)
    )


def one_image_and_a_rest(N=31, far=4.0):
    """One image at 0 and a cloud beside it; also a function of z that gives the proposal q.

    All points of the cloud have the same distance `far` along the first axis and lie around 0 along the others. So the
    first axis is a principal component. Moving z along it changes the cloud's share in q, but not q within the cloud.
    """
    generator = torch.Generator().manual_seed(3)
    cloud = torch.randn(N - 1, 8, generator=generator) * torch.tensor(
        [0.0, 2.0, 1.5, 1.2, 0.4, 0.4, 0.4, 0.4]
    )
    cloud += torch.tensor([far] + [0.0] * 7) - cloud.mean(0)
    reference = ReferenceSet(torch.cat([torch.zeros(1, 8), cloud]))
    basis = components_of(reference, R).basis.double()
    return reference, lambda z: torch.softmax(
        -((z - reference.images).double() @ basis).square().sum(1) / 2, 0
    )


def test_bias_is_linear_in_the_share_of_the_rest(every_u, keep):
    # docs/subspace_knn.md, "Exact, and biased": this is the expectation over the row's random number.
    (reference, q), far, grid, bias = one_image_and_a_rest(far=4.0), 4.0, 4000, []
    shares = torch.tensor([0.16, 0.08, 0.04, 0.02], dtype=torch.float64)
    keep(1)
    estimator = SubspaceKNN(r=R, n=5, compute="float32").bind(reference)
    for share in shares:
        z = 0.4 * torch.randn(1, 8, generator=torch.Generator().manual_seed(5))
        z[0, 0] = 0
        z[0, 0] = (share.logit() - (1 - q(z)[0]).logit()) / far
        assert (1 - q(z)[0]).item() == pytest.approx(share.item(), rel=1e-4)
        with every_u(grid):
            mean = estimator.posterior_mean(z.expand(grid, -1).contiguous(), 1.0).double().mean(0)
        bias.append((mean - posterior_mean(z, reference.images, 1.0)[0]).norm())
    slopes = torch.stack(bias).log().diff() / shares.log().diff()
    # Without the control variate the slope is 2.
    assert ((slopes - 1).abs() < 0.2).all(), slopes


@pytest.mark.parametrize("t", [0.7, 1.5, 4.0])
def test_certificate_is_the_error_as_components_are_added(t):
    x = low_rank_vectors(N=400, seed=2)
    reference, z = ReferenceSet(x), noisy(x[:60], t).repeat_interleave(20, 0)
    mu = posterior_mean(z, x, t)
    # The part that the kept images cancel is no error. If it counted, it would be the whole certificate at r = d.
    by_r = [
        (SubspaceKNN(r=r, n=24, compute="float32"), least)
        for r, least in ((4, 1e-4), (6, 1e-5), (8, 1e-6))
    ]
    for estimator, least in [*by_r, (KNN(k=40, n=60), 1e-4)]:
        certificate = estimator.bind(reference).certified_mean(
            z, t, generator=torch.Generator().manual_seed(1)
        )
        plain = estimator.posterior_mean(z, t, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(certificate.mean, plain)
        true = (certificate.mean.double() - mu).square().mean(1)
        assert true.mean() > least
        # Systematic draws are better than the independent draws that the certificate assumes.
        assert 0.3 < true.mean() / certificate.sq_error.mean() < 1.4
        assert (true < 10 * certificate.sq_error + 1e-9).double().mean() > 0.95
    exact = SubspaceKNN(r=D, n=24, compute="float32").bind(reference).certified_mean(z, t)
    assert exact.sq_error.mean() < 1e-8


def test_certificate_of_two_draws_is_their_error(keep):
    # Two draws of so many images are nearly independent. A variance without its factor s/(s - 1) would be half of it.
    x, t = low_rank_vectors(N=400, seed=2), 1.5
    z = noisy(x[:60], t).repeat_interleave(40, 0)
    keep(1)
    estimator = SubspaceKNN(r=6, n=3, compute="float32").bind(ReferenceSet(x))
    certificate = estimator.certified_mean(z, t, generator=torch.Generator().manual_seed(1))
    true = (certificate.mean.double() - posterior_mean(z, x, t)).square().mean(1)
    # The ratio was 0.95 to 1.06 at three levels; its standard error over the 2,400 rows is about 0.05.
    assert true.mean() / certificate.sq_error.mean() == pytest.approx(1, abs=0.25)


@pytest.mark.gpu
def test_rounding_hides_no_likely_image():
    # So far from the mean, bfloat16 moves the logarithms by far more than their range. Any image may then be likely.
    near = 3 * torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    x = torch.cat([near + 1000, -near - 1000])
    estimator = SubspaceKNN(r=4, n=18, compute="bfloat16").bind(ReferenceSet(x).to("cuda"))
    z = noisy(x, 1.0).repeat(50, 1)
    mean = estimator.posterior_mean(z.cuda(), 1.0).cpu().double()
    # Nearly every z has one likely image. Where it could not be drawn, the mean would be another image, 6 away.
    assert (mean - posterior_mean(z, x, 1.0)).norm(dim=1).mean() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("radius", [12.0, 13.0, 14.5])
def test_mean_of_rest_beyond_bfloat16_is_of_its_images(radius):
    # The kept images are nearest along the components, and as far as the others across them.
    ring = torch.nn.functional.normalize(
        torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    )
    centre = torch.tensor([6 * radius, 0.0, 0.0, 0.0])
    x = torch.cat([torch.stack([centre, centre]), centre + radius * ring])
    x = torch.cat([x, torch.zeros(42, 1)], 1)
    x[:2, 4] = torch.tensor([radius, -radius])
    estimator = SubspaceKNN(r=4, n=8, compute="bfloat16").bind(
        ReferenceSet(torch.cat([x, -x])).to("cuda")
    )
    z = torch.cat([centre, torch.zeros(1)]).expand(20, -1).cuda()
    # A mean of drawn images is within the radius, and the mean of the rest is within another two of them.
    assert ((estimator.posterior_mean(z, 1.0) - z).norm(dim=1) < 3 * radius).all()


@pytest.mark.parametrize("t", [0.002, 0.01, 0.1])
def test_frames_of_a_video_are_told_apart(t):
    # Two scenes of 1,000 frames: far more near-duplicates than the estimator gathers.
    generator = torch.Generator().manual_seed(1)
    scenes = pixels(2, (3, 16, 16)).flatten(1).float().repeat_interleave(1000, 0)
    frames = (
        (scenes + 2 * torch.randn(scenes.shape, generator=generator))
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )
    reference = ReferenceSet(frames.view(-1, 3, 16, 16))
    z = noisy(reference.gather(torch.arange(0, 2000, 40)), t)
    x = reference.gather(torch.arange(2000))
    error = SubspaceKNN().bind(reference).posterior_mean(z, t).double() - posterior_mean(z, x, t)
    # A frame differs from the others of its scene by (2/127.5)² = 2e-4 in each dimension.
    assert error.square().flatten(1).mean(1).max() < 1e-6
