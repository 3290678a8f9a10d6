"""Stable Velocity's target has the law of STF above the switch, by enumeration of all its draws in float64."""

import csv
import itertools
from collections import Counter

import pytest
import torch
import yaml
from scipy.stats import chisquare

from lit_knn.common.settings import describe
from lit_knn.estimators import STF, Exact, OneSample, Switched, class_conditional
from lit_knn.metrics import ErrorCurve
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import posterior_source
from lit_knn.reference import ReferenceSet
from main import main
from tests.every_estimator import every_estimator
from tests.toys import enumerate_class_mean, pixels

# A class has N images, of which a bank has n. A second class is far away.
N, n, T = 4, 3, 1.3
DRAWS = 40_000
Z = torch.tensor([0.4, -0.2], dtype=torch.float64)


def reference():
    own = torch.randn(N, 2, generator=torch.Generator().manual_seed(3))
    return ReferenceSet(torch.cat([own, own + 9]), labels=torch.arange(2 * N) // N)


def likelihoods(x):
    return torch.exp(-(Z - x.double()).square().sum(1) / (2 * T**2))


def law_of_stf(x):
    """The law of STF's images given z: the source comes from the posterior, and the others are independent of z."""
    p, law = likelihoods(x), Counter()
    for source, *others in itertools.product(range(N), repeat=n):
        law[tuple(sorted((source, *others)))] += p[source].item()
    return {bank: weight / law.total() for bank, weight in law.items()}


def target(x, bank):
    p = likelihoods(x)[list(bank)]
    return (p[:, None] * x[list(bank)].double()).sum(0) / p.sum()


def test_drawn_targets_have_the_enumerated_law():
    data = reference()
    made = every_estimator(n=n)["stable_velocity"]()
    assert describe(made) == describe(Switched(OneSample(), STF(n), 1.0))
    x, generator = data.images[:N], torch.Generator().manual_seed(5)
    sources = torch.multinomial(likelihoods(x), DRAWS, replacement=True, generator=generator)
    z, labels = Z.float().expand(DRAWS, 2), torch.zeros(DRAWS, dtype=torch.int64)
    bound = class_conditional(made).bind(data)
    mean = bound.posterior_mean(z, T, x[sources], generator, labels)
    expected = law_of_stf(x)
    atoms = torch.stack([target(x, bank) for bank in expected])
    distance, nearest = torch.cdist(mean.double(), atoms).min(1)
    assert distance.max() < 1e-5
    counts = torch.bincount(nearest, minlength=len(expected))
    assert chisquare(counts, torch.tensor(list(expected.values())) * DRAWS).pvalue > 1e-3
    # Below the switch it is the source, whatever the bank.
    assert torch.equal(bound.posterior_mean(z, 0.999, x[sources], generator, labels), x[sources])


# The measurement with classes


def test_errors_with_classes_are_those_against_the_mean_of_the_class():
    data = ReferenceSet(pixels(60, (1, 4, 4)), labels=torch.arange(60) % 3)
    curve = ErrorCurve({"one": OneSample(), "exact": Exact()}, [0.5, 2.0], 30, 2, 16, class_conditional=True)
    for level, t in zip(curve.levels(data), (0.5, 2.0), strict=True):
        one, exact = level
        latents = NoisyLatents(data, 30, 0)
        z, x = latents.batch(range(30), t)
        mu = enumerate_class_mean(data, z, t, latents.labels(range(30)))
        assert one["mu_mse"] == pytest.approx((x - mu).square().mean().item(), rel=1e-5)
        assert exact["mu_mse"] < 1e-9


@pytest.mark.parametrize("hflip", [False, True])
def test_resampled_sources_have_the_posterior_of_the_class(hflip):
    data = ReferenceSet(pixels(12, (1, 4, 4)), hflip=hflip, labels=torch.arange(12) % 3)
    z, labels = torch.zeros(3, 1, 4, 4), torch.tensor([2, 0, 1])
    source = posterior_source(data, z, 3.0, 4000, (0,), labels)
    drawn = torch.stack([source(repeat) for repeat in range(4000)])
    found = data.locate(drawn.reshape(-1, 1, 4, 4))
    assert torch.equal(data.labels[found].reshape(4000, 3), labels.expand(4000, 3))
    # Monte Carlo's error of a mean of 4,000 images is about 0.01.
    torch.testing.assert_close(drawn.mean(0).double(), enumerate_class_mean(data, z, 3.0, labels), rtol=0, atol=0.04)


def test_the_callback_measures_with_classes(tmp_path):
    estimators = {"exact": {"class_path": "Exact"}, "one": {"class_path": "OneSample"}}
    options = {"estimators": estimators, "noise_levels": [2.0], "num_z": 8, "repeats": 2, "class_conditional": True}
    callback = {"class_path": "lit_knn.callbacks.EstimatorError", "init_args": options}
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "limit_val_batches": 1, "callbacks": [callback]}
    trainer["logger"] = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(tmp_path), "name": "run"}}
    config = tmp_path / "error.yaml"
    config.write_text(yaml.safe_dump({"model": "LitEstimator", "data": "Digits", "trainer": trainer}))
    main(["validate", "-c", str(config)])
    with (tmp_path / "run" / "estimator_0" / "estimator_error.csv").open() as file:
        exact, one = csv.DictReader(file)
    assert float(exact["mu_mse"]) < 1e-9
    # One class of the digits varies less than all of them.
    assert 0.05 < float(one["mu_mse"]) < 0.2
