"""Gradients, errors and agreement of the learning curves are those of closed forms and enumeration."""

import math

import pytest
import torch
from torch import nn

from benchmarks.learning_curves.agreement import Agreement
from benchmarks.learning_curves.gradient_moments import gradient_moments
from benchmarks.learning_curves.kind import Latents
from benchmarks.learning_curves.kinds import KINDS
from benchmarks.learning_curves.measurements import Measurements
from benchmarks.learning_curves.sets import Images, Lengths
from benchmarks.noise_sizes import posterior_variances
from benchmarks.score_difference_bias import contrast_growth, moves_at
from lit_knn.estimators import Exact, OneSample
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import cross_sq_dist, log_posterior


class Linear(nn.Module):
    """A network that is a matrix: W times its flattened input."""

    def __init__(self, d):
        super().__init__()
        self.matrix = nn.Parameter(
            torch.randn(d, d, generator=torch.Generator().manual_seed(4)) / d
        )

    def forward(self, z, noise_label, class_label=None):
        return (z.flatten(1) @ self.matrix.T).reshape(z.shape)


@pytest.fixture
def seven():
    """A set of seven images."""
    return ReferenceSet(torch.rand(7, 1, 2, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1)


def posterior(reference, z, t):
    """Weights of the images, (B, N), in float64 by enumeration, and the images."""
    x = reference.gather(torch.arange(reference.N)).flatten(1).double()
    return log_posterior(cross_sq_dist(z.flatten(1).double(), x), t).exp(), x


def test_gradient_variance_of_linear_denoiser_is_closed_form(seven):
    lengths = {
        "steps": 2,
        "consistency_steps": 2,
        "measurements": 2,
        "batch_size": 16,
        "samples": 80,
    }
    kind = KINDS["EDM"]
    images = Images(seven, None, seven)
    measurements = Measurements(kind, images, Lengths(held=2, pairs=3, repeats=1500, **lengths))
    _, z, t, _, _ = measurements.pairs
    module = kind.make(Linear(4), {"estimator": OneSample()}, 0, 10, None)
    found = measurements.gradients(module)
    weights, x = posterior(seven, z, t)
    mean = weights @ x
    trace = (weights * x.square().sum(1)).sum(1) - mean.square().sum(1)
    # D = c_skip·z + c_out·W·(c_in·z), so dL_i/dW = 2 λ c_out (D − target) (c_in·z)ᵀ for the sum over pixels, and λ is
    # 1/c_out². The batch averages three independent items.
    c_out = t * 0.5 / (t.square() + 0.25).sqrt()
    z_in = z.flatten(1).double() / (t.square() + 0.25).sqrt()[:, None]
    variance = (4 / c_out.square() * z_in.square().sum(1) * trace).sum() / 9
    assert found.variance == pytest.approx(variance.item(), abs=4 * found.variance_se)
    assert found.variance_se < 0.05 * found.variance
    skip = 0.25 / (t.square() + 0.25)
    output = skip[:, None] * z.flatten(1) + c_out[:, None] * (
        z_in @ module.denoiser.model.matrix.T.double()
    )
    gradient = ((2 / c_out)[:, None, None] * (output - mean)[:, :, None] * z_in[:, None]).mean(0)
    assert found.norm_sq == pytest.approx(gradient.square().sum().item(), rel=0.05)
    # One sample is unbiased. The squared bias has a standard error of about variance/R.
    assert abs(found.bias_sq) < 8 * found.variance / 1500


def test_bias_of_a_gradient_is_its_distance_from_the_exact_one():
    shift = torch.tensor([3.0, 0.0, -4.0])
    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(2))
    moments = gradient_moments(draws + 1 + shift, torch.ones(3))
    assert moments.variance == pytest.approx(3, rel=0.05)
    # The standard error is 2·5/√4000 = 0.16.
    assert moments.bias_sq == pytest.approx(25, abs=0.6)


def test_agreement_is_the_distance_to_enumerated_means_at_new_latents(seven):
    kind = KINDS["EDM"]
    new = ReferenceSet(torch.rand(5, 1, 2, 2, generator=torch.Generator().manual_seed(9)))
    latents = kind.latents(new, 30, 2)
    module = kind.make(Linear(4), {"estimator": OneSample()}, 0, 10, None)
    with torch.no_grad():
        row = Agreement(kind, latents, seven).distances(module)
        output = module.denoiser(latents.z, latents.t, None, None).flatten(1).double()
    weights, x = posterior(seven, latents.z, latents.t)
    weight = (latents.t.square() + 0.25) / (latents.t * 0.5).square()
    expected = (weight * (output - weights @ x).square().mean(1)).mean()
    assert row["distance_to_exact"] == pytest.approx(expected.item(), rel=1e-3)
    assert row["distance_to_smoothed"] != row["distance_to_exact"]
    assert all(map(math.isnan, Agreement(kind, None, seven).distances(module).values()))


@pytest.mark.parametrize("name", ["EDM", "flow"])
def test_regression_error_is_loss_with_enumerated_targets(name, seven):
    kind = KINDS[name]
    latents = kind.latents(seven, 40, 0)
    scale, sigma = kind.process.scale(latents.t), kind.process.sigma(latents.t)
    weights, x = posterior(seven, latents.z / scale.float()[:, None, None, None], sigma)
    wanted = kind.exact_output(latents, Exact().bind(seven))
    torch.testing.assert_close(wanted.flatten(1).double(), weights @ x, rtol=0, atol=1e-4)
    module = kind.make(Linear(4), {"estimator": Exact().bind(seven)}, 0, 10, None)
    losses = kind.losses(module, latents, latents.x, torch.Generator())
    torch.testing.assert_close(losses, kind.errors(module, latents, wanted), rtol=1e-4, atol=1e-4)


def test_the_posterior_of_two_images_has_the_variance_of_a_coin():
    x = torch.stack([torch.full((1, 2, 2), value) for value in (-0.25, 0.5)])
    t, z = torch.tensor([0.4, 1.5]), torch.randn(2, 1, 2, 2, generator=torch.Generator())
    found = posterior_variances(ReferenceSet(x), Latents(z, z, t, t, None))
    # The difference of the images has four parts of 0.75, and their midpoint is 0.125.
    odds = (0.75 * (z.double() - 0.125).flatten(1).sum(1) / t.double().square()).exp()
    share = odds / (1 + odds)
    assert found.tolist() == pytest.approx((share * (1 - share) * 0.75**2).tolist(), rel=1e-5)


def test_growth_of_contrast_is_the_share_of_moves_along_deviations(seven):
    x = seven.take(torch.arange(7))
    deviations = x - x.mean((1, 2, 3), keepdim=True)
    across = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]])
    across = (
        across
        - (across * deviations).sum((1, 2, 3), keepdim=True)
        / deviations.square().sum((1, 2, 3), keepdim=True)
        * deviations
    )
    growth = contrast_growth(x, 0.1 * deviations + 0.3 + across)
    assert growth == pytest.approx({"contrast": 0.1, "contrast_se": 0}, abs=1e-6)
    # One image of four with equal deviations has all of the growth.
    same = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]]).repeat(4, 1, 1, 1)
    growth = contrast_growth(same, same * torch.tensor([0.4, 0, 0, 0]).reshape(4, 1, 1, 1))
    assert growth == pytest.approx({"contrast": 0.1, "contrast_se": 0.1}, abs=1e-6)


def test_moves_between_sets_of_one_image_are_their_difference(seven):
    x = seven.take(torch.arange(7))
    one, other = (Exact().bind(ReferenceSet(x[i : i + 1])) for i in (0, 1))
    moves = moves_at(x, 2.0, one, other, seed=0)
    assert torch.allclose(moves, (x[0] - x[1]).expand_as(x), atol=1e-6)
    assert moves_at(x, 1.0, one, one, seed=0).abs().max() < 1e-6
