"""Rounding must not look like error at small noise, where the score divides by t⁴; the reference is in float64."""

import pytest
import torch

from lit_knn.data import Digits
from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, SubspaceKNN, TopK
from lit_knn.estimators.draws import merged
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import fixed_source, measure
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean

MAKERS = {
    "KNN": lambda: KNN(k=64, n=32),
    "SubspaceKNN": lambda: SubspaceKNN(r=16, n=32, compute="float32"),
    "MonteCarlo": lambda: MonteCarlo(n=32),
    "STF": lambda: STF(n=32),
    "Exact": lambda: Exact(),
}
every_estimator = pytest.mark.parametrize("name", MAKERS)


def images(N, copies=1, side=16):
    """Images, uint8; each one occurs `copies` times."""
    own = torch.randint(0, 256, (N, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return own.repeat_interleave(copies, 0)


def score_mse(estimator, reference, t, num_z=32):
    """Measure the score's MSE as the callback `EstimatorError` does."""
    z, x = NoisyLatents(reference, num_z, 0).batch(range(num_z), t)
    mu = Exact().bind(reference).posterior_mean(z.double(), t)
    values = measure(estimator.bind(reference), 3, z, t, mu, fixed_source(x), (0, 0))
    return values["mse"].mean().item() / t**4


@every_estimator
@pytest.mark.parametrize("t", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_score_of_images_far_apart_has_no_floor(name, t, copies):
    # The posterior is one image or its copies, so every estimate is that image to the last bit.
    assert score_mse(MAKERS[name](), ReferenceSet(images(64, copies)), t) == 0


@pytest.mark.parametrize("t", [0.002, 0.005, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("name", ["KNN", "SubspaceKNN", "MonteCarlo"])
def test_the_score_of_the_digits_has_no_floor(name, t, digits):
    assert score_mse(MAKERS[name](), digits, t) < 1e-10


@pytest.fixture(scope="module")
def digits():
    data = Digits()
    data.setup("validate")
    return data.reference


@pytest.mark.parametrize("t", [0.02, 0.5, 5.0])
def test_where_images_share_the_posterior_their_weights_are_those_of_float64(t):
    # The images of a pair have distance 2t, spread over many dimensions.
    x = t * torch.randn(40, 3072, generator=torch.Generator().manual_seed(1))
    x[1::2] = x[::2] + 2 * t / 3072**0.5 * torch.randn(20, 3072, generator=torch.Generator().manual_seed(2))
    z = x[::2] + t * torch.randn(20, 3072, generator=torch.Generator().manual_seed(3))
    mu = posterior_mean(z, x, t)
    spread = (x[::2] - x[1::2]).double().norm(dim=1)
    estimate = TopK(40).bind(ReferenceSet(x)).posterior_mean(z, t)
    assert ((estimate - mu).norm(dim=1) / spread).square().mean().sqrt() < 1e-5


def test_merged_draws_are_the_draws_they_stand_for():
    ids = torch.tensor([[4, 2, 4, 4], [7, 7, 7, 7], [3, 1, 0, 2]])
    log_correction = -(ids + 1.0).double().log()
    draws = merged(ids, log_correction)
    used = (draws.log_factor > -torch.inf).sum(1).tolist()
    assert used == [2, 1, 4]
    assert [draws.ids[row, : used[row]].tolist() for row in range(3)] == [[2, 4], [7], [0, 1, 2, 3]]
    assert draws.copies.tolist() == [[1, 3, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1]]
    weights = torch.softmax(draws.log_factor - draws.ids.double() / 2, 1)
    for row in range(3):
        single = torch.softmax(-ids[row].double() / 2 + log_correction[row], 0)
        for place in range(used[row]):
            torch.testing.assert_close(weights[row, place], single[ids[row] == draws.ids[row, place]].sum())
        assert (weights[row, used[row] :] == 0).all()


def test_certificates_are_those_of_the_single_draws():
    # The formulas of effective sample size, largest weight and error use all n draws, including equal ones.
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    z = torch.zeros(1, 2)
    estimator = KNN(k=3, n=10).bind(ReferenceSet(x))
    from lit_knn.theory.proposal import sample_proposal

    for seed in range(5):
        one = torch.ones(1, dtype=torch.float64)
        ids, log_q = sample_proposal(estimator.proposal(z, one), 10, torch.Generator().manual_seed(seed))
        assert len(ids.unique()) < 10
        weights = torch.softmax(-x.double()[ids[0]].square().sum(1) / 2 - log_q[0], 0)
        mean = weights @ x.double()[ids[0]]
        certificate = estimator.certified_mean(z, 1.0, generator=torch.Generator().manual_seed(seed))
        spread = weights.square() @ (x.double()[ids[0]] - mean).square().mean(1)
        for ours, expected in zip(
            certificate,
            (mean, 1 / weights.square().sum(), weights.max(), spread / (1 - weights.square().sum())),
            strict=True,
        ):
            torch.testing.assert_close(ours[0].double(), expected, rtol=1e-5, atol=1e-7)
