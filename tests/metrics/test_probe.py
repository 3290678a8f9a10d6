import numpy as np
import pytest
import torch

from lit_knn.commands.probe import Findings, TrainingNoise, conclude, crossing, sentences
from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.estimators import STF, Exact, OneSample
from lit_knn.metrics.estimator_error import MeanAndError
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.probe import Probe, distances
from lit_knn.modules import LitEDM, LitFlow, LitICT
from lit_knn.nets import UNet
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.solvers import euler_step
from tests.toys import low_rank_vectors


def enumerated(x, z, t):
    """The posterior over x (N, d) at z (B, d), in NumPy: probabilities, mean and variance per dimension."""
    log_p = -((z[:, None] - x) ** 2).sum(2) / (2 * t**2)
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    mean = p @ x
    return p, mean, (p * ((x - mean[:, None]) ** 2).sum(2)).sum(1) / x.shape[1]


@pytest.mark.parametrize("by_class", [False, True])
def test_a_level_is_what_enumeration_says(by_class):
    images, labels = low_rank_vectors(80), torch.arange(80) % 2
    reference, held_out = (ReferenceSet(images[rows], labels=labels[rows]) for rows in (slice(60), slice(60, 80)))
    probe, t = Probe(reference, held_out, {"Exact": Exact()}, 40, by_class), 0.6
    level = probe.level(0, t)
    for name, own in (("irreducible", reference), ("held_out", held_out)):
        latents = NoisyLatents(own, 40, 0)
        z, x = latents.batch(range(len(latents.ids)), t)
        for i in range(len(z)):
            rows = own.labels[latents.ids[i]] == reference.labels if by_class else slice(None)
            of_class = reference.images[rows].double().numpy()
            p, mean, variance = enumerated(of_class, z[[i]].double().numpy(), t)
            # float32 images and latents, of size about 5, differ from float64 only in sums of 60 terms.
            if name == "held_out":
                assert level[name][i] == pytest.approx(((x[i].numpy() - mean) ** 2).mean(), rel=1e-6)
            else:
                assert level[name][i] == pytest.approx(variance[0], rel=1e-6)
                assert level["images"][i] == pytest.approx(np.exp(-(p * np.log(p + 1e-300)).sum()), rel=1e-6)
                assert level["collapsed"][i] == (p.max() > 0.99)
    assert 0 < level["collapsed"].mean() < 1
    # `Exact` errs only by the rounding of float32.
    assert level["Exact"].max() < 1e-9


def test_the_linear_denoiser_is_the_wiener_filter():
    images, t = low_rank_vectors(60), 2.0
    reference = ReferenceSet(images)
    z, x = (values.double().numpy() for values in NoisyLatents(reference, 60, 0).batch(range(60), t))
    mean, covariance = images.double().numpy().mean(0), np.cov(images.double().numpy().T, bias=True)
    linear = mean + (z - mean) @ np.linalg.solve(covariance + t**2 * np.eye(12), covariance)
    found = Probe(reference, None, {}, 60).level(0, t)["wiener"]
    torch.testing.assert_close(found, torch.from_numpy(((linear - x) ** 2).mean(1)), rtol=1e-4, atol=0)


def test_two_points_have_the_variance_of_their_closed_form():
    # With x = ±a the variance at z is a²(1 − tanh²(a z / t²)), and z is ±a + t ε: an integral over ε.
    a, t = 0.8, 0.7
    reference = ReferenceSet(torch.tensor([[a], [-a]]).repeat(2000, 1))
    epsilon, weights = np.polynomial.hermite_e.hermegauss(80)
    expected = (a**2 / np.cosh(a * (a + t * epsilon) / t**2) ** 2 * weights).sum() / weights.sum()
    level = Probe(reference, None, {"OneSample": OneSample(), "STF": STF(64)}, 4000).level(0, t)
    for name in ("irreducible", "OneSample"):  # Drawn from the posterior, one sample has the posterior's variance.
        values = level[name]
        assert abs(values.mean() - expected) < 4 * values.std() / len(values) ** 0.5
    assert level["STF"].mean() < 0.1 * expected


def test_a_tenth_of_the_images_collapses_at_more_noise():
    level = Probe(ReferenceSet(low_rank_vectors(400)), None, {}, 400).level(0, 0.6)
    assert level["collapsed_tenth"].mean() > level["collapsed"].mean() + 0.2


def test_distances_are_those_of_all_pairs():
    images = low_rank_vectors(50)
    pairs = torch.cdist(images.double(), images.double())
    nearest = pairs.fill_diagonal_(torch.inf).amin(1).median().item()
    largest = pairs.fill_diagonal_(0).max().item()
    assert distances(ReferenceSet(images), 50, 0) == pytest.approx((nearest, largest), rel=1e-6)


def test_the_weight_of_edm_and_of_flow_is_that_of_their_loss():
    net, shape = UNet(1, 8), (1, 4, 4)
    edm = TrainingNoise.of(LitEDM(net, OneSample(), sigma_data=0.7), shape, 0)
    ratio = edm.weight * (edm.sigma * 0.7).square() / (edm.sigma.square() + 0.7**2)
    assert ratio.max() / ratio.min() < 1.02  # A table of 65 times is interpolated.
    assert edm.sigma.log().mean().item() == pytest.approx(-1.2, abs=5 * 1.2 / len(edm.sigma) ** 0.5)
    flow = TrainingNoise.of(LitFlow(net, OneSample()), shape, 0)
    tau = flow.sigma / (1 + flow.sigma)
    inner = (tau > 0.05) & (tau < 0.95)
    ratio = (flow.weight * tau.square())[inner]
    assert ratio.max() / ratio.min() < 1.05


def test_the_weight_of_consistency_training_is_how_far_an_error_moves_z_hat():
    model = LitICT(UNet(1, 8), OneSample())
    model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    noise = TrainingNoise.of(model, (1, 4, 4), 0)
    t, r = model.draw_levels(len(noise.sigma), torch.Generator().manual_seed(1))
    z, mu = torch.zeros(len(t), 1, dtype=torch.float64), torch.ones(len(t), 1, dtype=torch.float64)
    moved = euler_step(z, t, r, lambda z, t: mu) - euler_step(z, t, r, lambda z, t: 0 * mu)
    expected = moved.flatten().square() / (t - r)
    # Other draws of the same 1,280 levels.
    assert noise.weight.mean() == pytest.approx(expected.mean().item(), rel=0.05)
    assert noise.weight.amax() == pytest.approx(expected.amax().item(), rel=1e-6)


def test_conclusions_from_known_curves():
    t = [2.0**i for i in range(-6, 7)]
    levels = []
    for level in t:
        # The noise is 1 above t = 1/8 and none below; STF leaves 1/t of it, KNN a fifth, up to t = 32.
        one = torch.full((8,), float(level > 1 / 8), dtype=torch.float64)
        stf = one * min(1.0, 0.04 / level)
        collapsed = 1 - one
        levels.append({"irreducible": one, "STF": stf, "KNN": one / 5, "collapsed": collapsed,
                       "collapsed_tenth": collapsed, "STF_ms": 2 * one + 1, "KNN_ms": one})  # fmt: skip
    counts = {1.0: 50_000, 16.0: 25_000, 1 / 64: 25_000}  # in the band, above it, and below the collapse
    sigma = torch.cat([torch.full((count,), level, dtype=torch.float64) for level, count in counts.items()])
    found = conclude(t, levels, ["STF", "KNN"], TrainingNoise("x", sigma, torch.ones(100_000)), 1.0)
    assert found.collapse == pytest.approx(1 / 8, rel=0.01)
    assert 2 < found.stf_level <= 4
    assert (found.above_collapse, found.noise_in_band, found.outside) == (0.75, pytest.approx(2 / 3), 0.0)
    assert found.removed["KNN"].mean == pytest.approx(0.8)
    assert found.removed["STF"].mean == pytest.approx(1 - (2 * 0.04 + 0.04 / 16) / 3)
    assert found.ms["STF"] == pytest.approx(0.75 * 3 + 0.25 * 1)


def test_what_is_said_fits_what_was_found():
    gain = MeanAndError(0.5, 0.01)
    found = Findings(0.2, 0.3, 4.0, None, 0.5, 0.0, 0.9, {"STF": gain, "KNN": gain}, {"STF": 1.0, "KNN": 2.0})
    noise = TrainingNoise("EDM", torch.ones(1), torch.ones(1))

    def said(**changes):
        return " ".join(sentences(found._replace(**changes), noise, None))

    assert "up to level 0.2 " in said()
    assert "between 0.2 and 4, where" in said()
    assert "no level" not in said(collapse=None, collapse_tenth=None)
    assert "Nothing has collapsed" in said(collapse=None)
    assert "wherever there is noise" in said(stf_level=0.1)
    assert "at all levels" in said(stf_level=None)
    assert "20.0% of the noise levels are outside" in said(outside=0.2)
    nothing = said(above_collapse=0.001)
    assert nothing.startswith("Nothing to gain")
    assert "KNN removes" in nothing
    assert "STF removes" in nothing


def test_by_class_the_noise_tends_to_the_variance_inside_the_classes():
    images = torch.randn(60, 12) + 10 * torch.arange(60).remainder(2).unsqueeze(1)
    probe = Probe(ReferenceSet(images, labels=torch.arange(60) % 2), None, {}, 60, by_class=True)
    level = probe.level(0, 1e3)
    inside = torch.stack([images[c::2].var(0, correction=0).mean() for c in (0, 1)]).mean().item()
    assert probe.scale.variance == pytest.approx(inside, rel=1e-5)
    assert level["irreducible"].mean() == pytest.approx(inside, rel=1e-3)
    assert level["wiener"].mean() == pytest.approx(inside, rel=1e-2)


def test_crossings_are_interpolated_in_the_logarithm():
    assert crossing([1.0, 4.0, 16.0], [1.0, 1.0, 0.0], 0.5) == pytest.approx(8.0)
    assert crossing([1.0, 4.0], [0.2, 0.1], 0.5) is None
    assert crossing([1.0, 4.0], [0.9, 0.8], 0.5) == 4.0


@pytest.mark.parametrize(
    ("images", "labels", "held_out", "rule"),
    [
        (torch.ones(9, 4), None, None, "the 9 images to train on do not differ"),
        (torch.randn(1, 4), None, None, "the 1 images to train on do not differ"),
        (torch.randn(9, 4), None, None, "by_class=true, but the data has no labels"),
        (torch.randn(9, 4), torch.arange(9) % 2, 2, "all images of class 2 are held out"),
    ],
)
def test_data_without_an_answer_is_refused(images, labels, held_out, rule):
    rest = None if held_out is None else ReferenceSet(torch.randn(1, 4), labels=torch.tensor([held_out]))
    with pytest.raises(InputError, match=rule):
        Probe(ReferenceSet(images, labels=labels), rest, {}, by_class="class" in rule)
