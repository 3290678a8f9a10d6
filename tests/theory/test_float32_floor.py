"""Rounding must not look like error at small noise, where the score divides by t⁴; the reference is in float64."""

import pytest
import torch

from lit_knn.estimators import KNN, STF, Exact, MonteCarlo, SubspaceKNN
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import fixed_source, measure_estimator
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from lit_knn.theory.proposal import sample_proposal

MAKERS = {
    "KNN": lambda: KNN(k=64, n=32),
    "SubspaceKNN": lambda: SubspaceKNN(r=16, n=32, compute="float32"),
    "MonteCarlo": lambda: MonteCarlo(n=32),
    "STF": lambda: STF(n=32),
    "Exact": Exact,
}


def score_mse(estimator, reference, t, num_z=32):
    """Measure the score's MSE as the callback `EstimatorError` does."""
    z, x = NoisyLatents(reference, num_z, 0).batch(range(num_z), t)
    mu = Exact().bind(reference).posterior_mean(z.double(), t)
    values = measure_estimator(estimator.bind(reference), 3, z, t, mu, fixed_source(x), (0, 0))
    return values["mse"].mean().item() / t**4


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("copies", [1, 3])
def test_the_score_of_images_far_apart_has_no_floor(name, copies):
    # The posterior is one image or its copies, so every estimate is that image to the last bit.
    images = torch.randint(
        0, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    reference = ReferenceSet(images.repeat_interleave(copies, 0))
    assert [score_mse(MAKERS[name](), reference, t) for t in (0.002, 0.01, 0.1)] == [0, 0, 0]


@pytest.mark.parametrize("t", [0.02, 0.5, 5.0])
def test_shared_posterior_has_the_weights_of_float64(t):
    # The images of a pair have distance 2t, spread over many dimensions.
    x = t * torch.randn(40, 3072, generator=torch.Generator().manual_seed(1))
    x[1::2] = x[::2] + 2 * t / 3072**0.5 * torch.randn(
        20, 3072, generator=torch.Generator().manual_seed(2)
    )
    z = x[::2] + t * torch.randn(20, 3072, generator=torch.Generator().manual_seed(3))
    mu = posterior_mean(z, x, t)
    spread = (x[::2] - x[1::2]).double().norm(dim=1)
    estimate = SubspaceKNN(40, 40).bind(ReferenceSet(x)).posterior_mean(z, t)
    assert ((estimate - mu).norm(dim=1) / spread).square().mean().sqrt() < 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_certificate_counts_every_draw_though_equal_ones_merge(seed):
    # The formulas of effective sample size, largest weight and error use all n draws, including equal ones.
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    z, t = (
        torch.tensor([[0.0, 0.0], [0.5, 0.0], [3.0, 3.0]]),
        torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
    )
    estimator = KNN(k=3, n=10).bind(ReferenceSet(x))
    ids, log_q = sample_proposal(estimator.proposal(z, t), 10, torch.Generator().manual_seed(seed))
    certificate = estimator.certified_mean(z, t, generator=torch.Generator().manual_seed(seed))
    for row, drawn in enumerate(ids):
        assert len(drawn.unique()) < 10
        images = x.double()[drawn]
        weights = torch.softmax(
            -(images - z[row]).square().sum(1) / (2 * t[row] ** 2) - log_q[row], 0
        )
        mean = weights @ images
        spread = weights.square() @ (images - mean).square().mean(1)
        expected = (
            mean,
            1 / weights.square().sum(),
            weights.max(),
            spread / (1 - weights.square().sum()),
        )
        for ours, value in zip(certificate, expected, strict=True):
            torch.testing.assert_close(ours[row].double(), value, rtol=1e-5, atol=1e-7)
