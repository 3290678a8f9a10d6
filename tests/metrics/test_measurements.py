"""Measurements where a fault would go unseen: sums, missing neighbours, and options that are passed on."""

import json
import os
from pathlib import Path

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


# Options of a measurement of fidelity


class WithLogits(Pixels):
    """Pixels, and three of them as logits."""

    num_logits = 3

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, features[:, :3]


IMAGES = (127 + 40 * normal(40, 1, 2, 2)).clamp(0, 255).to(torch.uint8)
SCORE = {"inception_score", "inception_score_std"}  # It compares with no image.


def measured(extractor=Pixels, **options):
    distance = FidelityMeasure(extractor(), 16, **options)
    reference, count = ReferenceSet(IMAGES), 30
    distance.prepare(reference, count)
    images = ReferenceSet(255 - IMAGES).gather(torch.arange(count))
    return distance(reference, [(torch.arange(count), images)], None)


def test_only_the_metrics_that_were_asked_for_are_returned(tmp_path):
    plain = measured(cache_dir=str(tmp_path))
    assert plain.keys() == {"fd_pixels"}
    assert measured(extra_metrics=["recall"]).keys() == {"fd_pixels", "recall"}
    assert measured(WithLogits).keys() == {"fd_pixels", *SCORE}
    found = measured(WithLogits, extra_metrics=["kid", "precision", "recall"], kid_subset_size=20, held_out=True)
    names = {"fd_pixels", "kid", "kid_std", "precision", "recall"}
    assert found.keys() == {f"{name}_held_out" for name in names} | SCORE
    # Statistics kept without features do not serve KID.
    few, many = (measured(cache_dir=str(tmp_path), extra_metrics=["kid"], kid_subset_size=size) for size in (5, 30))
    assert few.keys() == many.keys() == {"fd_pixels", "kid", "kid_std"}
    assert few["fd_pixels"] == pytest.approx(plain["fd_pixels"])
    assert few["kid_std"] > 1.5 * many["kid_std"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("extractor", "options", "count", "message"),
    [
        (Pixels, {"extra_metrics": ["kid"], "kid_subset_size": 31}, 30, "kid_subset_size=31 is more than the 30"),
        # Mirror images are no real images, so that they do not make enough.
        (Pixels, {"extra_metrics": ["kid"], "kid_subset_size": 60}, 80, "kid_subset_size=60 is more than the 40"),
        (Pixels, {"extra_metrics": ["recall"]}, 3, "need at least 4 images, there are 3"),
        (WithLogits, {}, 9, "inception_score: 9 images are fewer than its 10 splits"),
    ],
)
def test_too_few_images_are_refused_before_any_is_looked_at(extractor, options, count, message):
    reference = ReferenceSet(IMAGES, hflip=True)
    with pytest.raises(InputError, match=message):
        FidelityMeasure(extractor(), **options).prepare(reference, count)
    FidelityMeasure(extractor(), mirrored=True, **options).prepare(reference, 80)


class Dropping(NetworkExtractor):
    """A network whose output would change in training mode and under autocast."""

    metric = "fd_dropping"
    num_features = 4

    def _load_network(self):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 2 * 2, 4))

    def _extract(self, pixels):
        return self.network(pixels.float()), None

    def fingerprint(self):
        return "dropping"


def test_a_network_extracts_in_full_precision_and_without_dropout_whatever_the_run_does():
    extractor = Dropping()
    extractor.load((1, 2, 2), "cpu")
    weight, bias = extractor.network[2].weight, extractor.network[2].bias
    expected = IMAGES[:5].float().expand(-1, 3, -1, -1).flatten(1) @ weight.T + bias
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, _ = extractor(ReferenceSet(IMAGES).gather(torch.arange(5)))
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
    knn = KNN(k=k, n=n).bind(ReferenceSet(x, index=FindsFew(5)))
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
    assert (found.distance.item(), found.second_distance.item(), found.ratio.item()) == (0.5, 0.5, 1.0)


def test_the_certificate_is_of_the_source_of_the_latents():
    x, t = normal(30, 3), 3.0
    # An index that finds all neighbours would find the source, too.
    knn = KNN(k=2, n=16, include_source=True).bind(ReferenceSet(x, FindsOnlySources(0)))
    z = x[:5] + t * normal(5, 3, seed=2)
    values = measure(knn, 2, z, t, posterior_mean(z, x.double(), t), fixed_source(x[:5]), (3, 4))
    expected = knn.certified_mean(z, t, x[:5], keyed_generator(z.device, 3, 4, 0, Stream.ESTIMATOR))
    for name, value in zip(CERTIFIED, expected[1:], strict=True):
        torch.testing.assert_close(values[name].double(), value.double())


# Rows of an error curve


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
    clock, z = [0.0], normal(10, 3)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    values = measure(Slow(clock), 4, z, 1.0, z.double(), fixed_source(z), (0, 0))
    assert values[TIME].tolist() == pytest.approx([1000 * 0.5 / 10] * 10)


def test_every_column_of_the_nearest_neighbours_has_a_number():
    reference, knn = ReferenceSet(normal(30, 3)), KNN(k=8, n=16)
    (row,) = error_curve({"KNN": knn}, reference, [0.8], num_z=6, repeats=4, batch_size=4)
    assert all(isinstance(row[column], float) for column in COLUMNS.values())
    z, _ = NoisyLatents(reference, 6, 0).batch(range(6), 0.8)
    found = search_diagnostics(knn, z, 0.8, posterior_mean(z, reference.images.double(), 0.8))
    expected = {"search_recall": found.recall, "posterior_mass_found": found.found_mass}
    expected |= {"Zq_over_pt": found.normaliser_ratio, "eq12_variance": found.eq12_variance}
    expected |= {"theorem_4_1_bound": found.bound_4_1, "theorem_4_2_bound": found.bound_4_2}
    assert {name: row[name] for name in expected} == pytest.approx({k: v.mean().item() for k, v in expected.items()})
    assert row["score_mse"] == pytest.approx(row["mu_mse"] / 0.8**4)


@pytest.mark.usefixtures("blank_figures")
def test_the_run_measures_with_its_seed_and_with_resampled_sources_where_asked(tmp_path):
    def row(seed, **options):
        callback = EstimatorError({"one": OneSample()}, [1.0], num_z=30, repeats=60, **options)
        logger = pl.loggers.CSVLogger(tmp_path, name="run")
        trainer = pl.Trainer(**{**TRAINER, "logger": logger, "limit_val_batches": 1}, callbacks=[callback])
        trainer.validate(LitEstimator(seed=seed), Images(), verbose=False)
        (found,) = read_rows(Path(logger.log_dir) / "estimator_error.csv")
        return found

    plain, drawn = row(0), row(0, resample_source=True)
    assert plain["mu_mse"] == row(0)["mu_mse"]
    assert plain["mu_mse"] != row(1)["mu_mse"]
    assert (plain["repeats"], plain["mu_variance"], drawn["repeats"]) == ("1", "", "60")
    # One image with a drawn source is a draw from the posterior, so it has no bias.
    assert abs(float(drawn["mu_bias_sq_corrected"])) < 0.1 * float(drawn["mu_variance"])


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
