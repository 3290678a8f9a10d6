"""Measurements where a fault would go unseen: order, sums, missing neighbours, and options that are passed on."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.callbacks import EstimatorError
from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.tables import read_rows
from lit_knn.estimators import KNN, Estimator, OneSample
from lit_knn.index import Index
from lit_knn.metrics import FidelityMeasure, Pixels, error_curve, nearest_images
from lit_knn.metrics.diagnostics import search_diagnostics
from lit_knn.metrics.error_curve import COLUMNS
from lit_knn.metrics.features import NetworkExtractor
from lit_knn.metrics.fidelity import FeatureSums, kernel_distance, precision_recall
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.measure import CERTIFIED, TIME, fixed_source, measure
from lit_knn.modules import LitEstimator
from lit_knn.reference import ReferenceSet
from lit_knn.theory.bounds import theorem_4_1_bound, theorem_4_2_bound
from lit_knn.theory.posterior import posterior_mean
from tests.short_training import TRAINER
from tests.watched import Images


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Sums of features


def test_the_covariance_of_features_far_from_zero_is_that_of_float64():
    features = 1000 + normal(400, 5)
    sums = FeatureSums(5)
    for part in features.split(64):
        sums.update(torch.arange(len(part)), part)
    expected = np.cov(features.double().numpy(), rowvar=False)
    np.testing.assert_allclose(sums.compute().cov, expected, atol=1e-6)


def test_precision_is_of_the_generated_and_recall_of_the_real_images():
    real = normal(60, 2)
    near = real[:4].repeat(10, 1) + 1e-3 * normal(40, 2, seed=1)  # realistic, but all of a few kinds
    found = precision_recall(near, real)
    assert found["precision"] == 1
    assert found["recall"] < 0.5


def test_kid_draws_subsets_of_the_size_asked_for():
    a, b = normal(40, 6), normal(40, 6, seed=1)
    assert kernel_distance(a, b, 40)["kid_std"] < 1e-6  # each subset is the whole set
    assert kernel_distance(a, b, 10)["kid_std"] > 1e-3


# What a measurement is asked for


class WithLogits(Pixels):
    """Pixels, and three of them as logits."""

    num_logits = 3

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, features[:, :3]


IMAGES = (127 + 40 * normal(40, 1, 2, 2)).clamp(0, 255).to(torch.uint8)


def measured(extractor=None, count=30, hflip=False, **options):
    distance = FidelityMeasure(extractor or Pixels(), 16, **options)
    reference = ReferenceSet(IMAGES, hflip=hflip)
    distance.prepare(reference, count)
    images = ReferenceSet(255 - IMAGES).gather(torch.arange(count))
    return distance(reference, [(torch.arange(count), images)], None)


def test_only_the_metrics_that_were_asked_for_are_returned():
    assert measured().keys() == {"fd_pixels"}
    assert measured(extra_metrics=["recall"]).keys() == {"fd_pixels", "recall"}
    assert measured(extra_metrics=["kid"], kid_subset_size=30).keys() == {"fd_pixels", "kid", "kid_std"}
    assert measured(WithLogits()).keys() == {"fd_pixels", "inception_score", "inception_score_std"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_metrics": ["kid"], "kid_subset_size": 31}, "kid_subset_size=31 is more than the 30 images"),
        ({"extra_metrics": ["recall"], "count": 3}, "need at least 4 images, there are 3"),
        ({"extractor": WithLogits(), "count": 9}, "inception_score: 9 images are fewer than its 10 splits"),
    ],
    ids=["kid", "recall", "inception score"],
)
def test_too_few_images_are_refused_before_any_is_looked_at(options, message):
    count = options.pop("count", 30)
    distance = FidelityMeasure(options.pop("extractor", Pixels()), **options)
    with pytest.raises(InputError, match=message):
        distance.prepare(ReferenceSet(IMAGES), count)


def test_mirror_images_do_not_make_enough_images_for_kid():
    reference = ReferenceSet(IMAGES, hflip=True)
    options = {"extra_metrics": ["kid"], "kid_subset_size": 60}
    with pytest.raises(InputError, match="kid_subset_size=60 is more than the 40 images"):
        FidelityMeasure(Pixels(), **options).prepare(reference, 80)
    FidelityMeasure(Pixels(), mirrored=True, **options).prepare(reference, 80)


def test_every_value_that_compares_with_held_out_images_has_their_name():
    metrics = ["kid", "precision", "recall"]
    found = measured(WithLogits(), extra_metrics=metrics, kid_subset_size=20, held_out=True)
    names = {"fd_pixels", "kid", "kid_std", "precision", "recall"}
    # The Inception Score compares with no image.
    assert set(found) == {f"{name}_held_out" for name in names} | {"inception_score", "inception_score_std"}


def test_statistics_kept_without_kid_are_not_taken_for_a_run_with_it(tmp_path, capsys):
    plain = measured(cache_dir=str(tmp_path))
    found = measured(cache_dir=str(tmp_path), extra_metrics=["kid"], kid_subset_size=20)
    assert found.keys() == {"fd_pixels", "kid", "kid_std"}
    assert found["fd_pixels"] == pytest.approx(plain["fd_pixels"])
    assert len(list(tmp_path.iterdir())) == 2


class Dropping(NetworkExtractor):
    """A network whose output would change in training mode and under autocast."""

    metric = "fd_dropping"
    num_features = 4

    def _load_network(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 2 * 2, 4))

    def _extract(self, pixels):
        return self.network(pixels.float()), None

    def fingerprint(self):
        return "dropping"


def test_a_network_extracts_in_full_precision_and_without_dropout_whatever_the_run_does():
    extractor = Dropping()
    extractor.load((1, 2, 2), "cpu")
    images = ReferenceSet(IMAGES).gather(torch.arange(5))
    weight, bias = extractor.network[2].weight, extractor.network[2].bias
    expected = IMAGES[:5].float().expand(-1, 3, -1, -1).flatten(1) @ weight.T + bias
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, _ = extractor(images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, expected)
    assert not features.requires_grad


# A search that finds too few


class FindsFew(Index):
    """Exact search that finds at most `most` neighbours and leaves the other places empty."""

    def __init__(self, most):
        self.most = most

    def check(self, N, d, device=None, k=1):
        """Accept every set."""

    def build(self, vectors):
        self._vectors = torch.cat(list(vectors.chunks()))

    def search(self, queries, k):
        sq_dist, ids = torch.cdist(queries, self._vectors).square().topk(k, largest=False)
        empty = torch.arange(k) >= self.most
        return sq_dist.masked_fill(empty, torch.inf), ids.masked_fill(empty, -1)

    def to(self, device):
        """Stay on the CPU."""


class FindsOnlySources(FindsFew):
    """A search that finds nothing, except images that are in the set."""

    def locate(self, queries):
        sq_dist, ids = torch.cdist(queries, self._vectors).square().min(1, keepdim=True)
        return sq_dist, ids


def test_diagnostics_of_a_search_that_finds_too_few():
    x, t, k, n = normal(30, 3), 0.8, 8, 16
    reference = ReferenceSet(x, index=FindsFew(5))
    knn = KNN(k=k, n=n).bind(reference)
    # Image 0 is among the neighbours of the first latent, and of no other.
    z = torch.cat([x[:1], x[10:13] + 0.3 * normal(3, 3, seed=2)])
    mu = posterior_mean(z, x.double(), t)
    found = search_diagnostics(knn, z, t, mu)
    sq_dist = torch.cdist(z.double(), x.double()).square()
    p = torch.softmax(-sq_dist / (2 * t**2), 1)
    near = sq_dist.argsort(1)[:, :5]
    assert found.recall.tolist() == pytest.approx([5 / 8] * 4)
    torch.testing.assert_close(found.found_mass, p.gather(1, near).sum(1))
    # Both theorems have their own right-hand side, in traces per dimension.
    trace_mc = (p * torch.cdist(mu, x.double()).square()).sum(1) / n
    torch.testing.assert_close(found.bound_4_1, theorem_4_1_bound(found.normaliser_ratio, trace_mc) / 3)
    uniform = (p.square() * torch.cdist(mu, x.double()).square()).sum(1) * 30 / n
    torch.testing.assert_close(found.bound_4_2, theorem_4_2_bound(found.found_mass, trace_mc, uniform, k, 30) / 3)
    assert not torch.allclose(found.bound_4_1, found.bound_4_2)


def test_an_empty_place_is_no_neighbour_of_a_sample():
    # Image 0 is near the sample but was not found; all that was found are copies of one image.
    x = torch.tensor([[9.0, 0.0], [1.0, 0.0], [1.0, 0.0], [50.0, 0.0], [60.0, 0.0]])
    found = nearest_images(torch.tensor([[1.5, 0.0]]), ReferenceSet(x, index=FindsFew(2)))
    assert found.distance.tolist() == [0.5]
    assert found.second_distance.tolist() == [0.5]
    assert found.ratio.tolist() == [1.0]

    class Misses(FindsFew):
        def search(self, queries, k):
            ids = torch.tensor([[3, 1, -1, -1, -1]])  # not in the order of the distances
            return torch.cdist(queries, self._vectors).square().gather(1, ids.clamp(min=0)), ids

    found = nearest_images(torch.tensor([[8.0, 0.0]]), ReferenceSet(x, index=Misses(2)))
    assert (found.distance.item(), found.second_distance.item(), found.ids.item()) == (7.0, 42.0, 1)


# Time


class Slow(Estimator):
    """Moves a clock by half a second in each call."""

    needs_reference = False
    deterministic = False

    def __init__(self, clock):
        self.clock = clock

    def _posterior_mean(self, z, t, x_source, generator):
        self.clock[0] += 0.5
        return torch.randn(z.shape, generator=generator)


def test_the_time_is_that_of_one_estimate_at_one_latent_in_milliseconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    z = normal(10, 3)
    values = measure(Slow(clock), 4, z, 1.0, z.double(), fixed_source(z), (0, 0))
    assert values[TIME].tolist() == pytest.approx([1000 * 0.5 / 10] * 10)


# Rows of an error curve


def test_every_column_of_the_nearest_neighbours_has_a_number():
    reference = ReferenceSet(normal(30, 3))
    options = {"num_z": 6, "repeats": 4, "batch_size": 4}
    knn = KNN(k=8, n=16)
    (row,) = error_curve({"KNN": knn}, reference, [0.8], **options)
    assert all(isinstance(row[column], float) for column in COLUMNS.values())
    z, _ = NoisyLatents(reference, 6, 0).batch(range(6), 0.8)
    found = search_diagnostics(knn, z, 0.8, posterior_mean(z, reference.images.double(), 0.8))
    expected = {"search_recall": found.recall, "posterior_mass_found": found.found_mass}
    expected |= {"Zq_over_pt": found.normaliser_ratio, "eq12_variance": found.eq12_variance}
    expected |= {"theorem_4_1_bound": found.bound_4_1, "theorem_4_2_bound": found.bound_4_2}
    assert {name: row[name] for name in expected} == pytest.approx({k: v.mean().item() for k, v in expected.items()})
    assert row["score_mse"] == pytest.approx(row["mu_mse"] / 0.8**4)


def test_a_resampled_source_makes_the_one_sample_estimate_a_draw_of_the_posterior():
    reference = ReferenceSet(normal(30, 3))
    options = {"num_z": 30, "repeats": 60}
    (fixed,) = error_curve({"one": OneSample()}, reference, [0.8], **options)
    (drawn,) = error_curve({"one": OneSample()}, reference, [0.8], resample_source=True, **options)
    assert (fixed["repeats"], fixed["mu_variance"]) == (1, "")
    assert drawn["repeats"] == 60
    assert abs(drawn["mu_bias_sq_corrected"]) < 0.1 * drawn["mu_variance"]


def test_the_certificate_is_of_the_source_of_the_latents():
    x, t = normal(30, 3), 3.0
    # An index that finds all neighbours would find the source, too.
    knn = KNN(k=2, n=16, include_source=True).bind(ReferenceSet(x, FindsOnlySources(0)))
    z = x[:5] + t * normal(5, 3, seed=2)
    mu = posterior_mean(z, x.double(), t)
    values = measure(knn, 2, z, t, mu, fixed_source(x[:5]), (3, 4))
    expected = knn.certified_mean(z, t, x[:5], keyed_generator(z.device, 3, 4, 0, Stream.ESTIMATOR))
    for name, value in zip(CERTIFIED, expected[1:], strict=True):
        torch.testing.assert_close(values[name].double(), value.double())


@pytest.mark.usefixtures("blank_figures")
def test_the_run_measures_with_its_seed_and_with_resampled_sources_where_asked(tmp_path):
    def row(seed, **options):
        callback = EstimatorError({"one": OneSample()}, [1.0], num_z=20, repeats=3, **options)
        logger = pl.loggers.CSVLogger(tmp_path, name="run")
        trainer = pl.Trainer(**{**TRAINER, "logger": logger, "limit_val_batches": 1}, callbacks=[callback])
        trainer.validate(LitEstimator(seed=seed), Images(), verbose=False)
        (found,) = read_rows(Path(logger.log_dir) / "estimator_error.csv")
        return found

    plain = row(0)
    assert plain["mu_mse"] == row(0)["mu_mse"]
    assert plain["mu_mse"] != row(1)["mu_mse"]
    assert (plain["repeats"], row(0, resample_source=True)["repeats"]) == ("1", "3")


# Results that are kept


def test_results_are_found_again_with_the_same_settings_alone(tmp_path):
    def kept(settings):
        return KeptResults(
            tmp_path / "new" / "rows.csv", {"name": str, "t": float, "mse": float}, ("name", "t"), settings
        )

    first = kept({("a",): {"k": 1}, ("b",): {"k": 2}})
    assert first.find("a", 0.5) is None
    first.add({"name": "a", "t": 0.5, "mse": 0.1})
    assert first.find("a", 0.5)["mse"] == kept({("a",): {"k": 1}}).find("a", 0.5)["mse"] == 0.1
    assert first.find("b", 0.5) is first.find("a", 1.0) is kept({("a",): {"k": 3}}).find("a", 0.5) is None
    first.add(first.find("a", 0.5))
    assert len(read_rows(first.path)) == 1
    path = tmp_path / "new" / "settings" / f"{first.hash_of('a')}.json"
    assert json.loads(path.read_text()) == {"k": 1}


def test_a_row_is_never_there_before_the_settings_that_it_names(tmp_path, monkeypatch):
    path, replaced, seen = tmp_path / "rows.csv", os.replace, []

    def watched(source, target):
        if Path(target) == path:
            for row in read_rows(Path(source)):
                seen.append(json.loads((tmp_path / "settings" / f"{row['settings']}.json").read_text()))
        replaced(source, target)

    monkeypatch.setattr(os, "replace", watched)
    KeptResults(path, {"name": str}, ("name",), {(): {"k": 1}}).add({"name": "a"})
    assert seen == [{"k": 1}]


def test_kid_has_the_subsets_of_the_options():
    deviations = [measured(extra_metrics=["kid"], kid_subset_size=size)["kid_std"] for size in (5, 30)]
    assert deviations[0] > 1.5 * deviations[1]
