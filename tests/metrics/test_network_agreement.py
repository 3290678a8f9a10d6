"""Agreement of estimators with trained networks: measures, and samples of the same noise."""

import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from lit_knn.common.tables import read_rows
from lit_knn.estimators import Estimator, Exact, Wiener
from lit_knn.index import TorchIndex
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.metrics.network_agreement import compare, image_sets, nearest, over_networks
from lit_knn.metrics.same_noise import SameNoise, agreement, same_noise
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.theory.noise import EDM, VP
from tests.toys import pixels


def test_the_measures_are_those_of_scikit_learn_and_numpy():
    wanted = 0.3 + torch.randn(7, 2, 3, 5)
    outputs = 0.8 * wanted + 0.4 * torch.randn(7, 2, 3, 5) - 0.1
    found = agreement(outputs, wanted)
    for row, images in enumerate(zip(outputs, wanted, strict=True)):
        y, w = (image.flatten().double().numpy() for image in images)
        correlation = np.corrcoef(y, w)[0, 1]
        assert found.mse[row].item() == pytest.approx(((y - w) ** 2).mean(), rel=1e-12)
        assert found.r2[row].item() == pytest.approx(r2_score(w, y), rel=1e-10)
        assert found.pearson_r[row].item() == pytest.approx(correlation, rel=1e-10)
        assert found.pearson_r2[row].item() == pytest.approx(correlation**2, rel=1e-10)
    # The mean of an image explains none of its variance.
    flat = agreement(wanted.double().mean((1, 2, 3), keepdim=True).expand_as(wanted), wanted)
    assert flat.r2.tolist() == pytest.approx([0.0] * 7, abs=1e-12)


class Offset(Estimator):
    """The exact mean, darker by a constant: it stands in for a network, whose error is then known."""

    deterministic = True

    def _posterior_mean(self, z, t, x_source, generator):
        return Exact().bind(self.reference).posterior_mean(z, t) - 0.25


def test_a_network_that_equals_an_estimator_agrees_wholly():
    reference, held_out = (ReferenceSet(pixels(n, (1, 6, 6))) for n in (30, 20))
    networks = {"itself": Exact().bind(reference), "darker": Offset().bind(reference)}
    estimators = {"Wiener": Wiener(r=4).bind(reference), "Exact": networks["itself"]}
    sampler = SameNoise(reference, num_steps=4, batch_size=10)
    generated, samples = ({name: sampler.draw(p, 16) for name, p in parts.items()} for parts in (networks, estimators))
    sets = image_sets(networks, {"training": reference, "held_out": held_out}, generated)
    rows, same = list(compare(estimators, sets, [0.2, 2.0], 16, sampler)), same_noise(samples, generated)
    kinds = {(row["estimator"], row["network"], row["images"], row["t"]) for row in rows}
    assert kinds == set(product(estimators, networks, ("training", "held_out", "generated"), (0.2, 2.0)))
    for row in rows:
        if row["estimator"] == "Exact":
            itself = row["network"] == "itself"
            # float32 sums leave about 1e-7 of an image.
            assert row["mse"] == pytest.approx(0 if itself else 0.25**2, abs=1e-6)
            assert row["pearson_r"] == pytest.approx(1, abs=1e-6)
            assert row["r2"] == pytest.approx(1, abs=1e-5) if itself else row["r2"] < 1
    pair = {(row["estimator"], row["network"]): row for row in same}
    assert pair["Exact", "itself"]["r2_median"] == 1
    assert pair["Wiener", "itself"]["r2_median"] < 0.99
    measured = agreement(samples["Wiener"], generated["itself"]).mse.numpy()
    found = [pair["Wiener", "itself"][f"mse_{quartile}"] for quartile in ("q25", "median", "q75")]
    assert found == pytest.approx(np.quantile(measured, (0.25, 0.5, 0.75)))
    own = next(row for row in over_networks(rows) if row["estimator"] == "Exact" and row["images"] == "training")
    assert (own["mse"], own["mse_low"], own["mse_high"]) == pytest.approx((0.03125, 0, 0.0625), abs=1e-6)
    # The networks share their images, so another network makes no error smaller.
    (twice,) = over_networks([rows[0], rows[0] | {"network": "another"}])
    assert twice["mse_se"] == pytest.approx(rows[0]["mse_se"])
    to_itself = over_networks([row for row in rows if row["network"] == "itself"])
    assert {row["estimator"] for row in nearest(to_itself)} == {"Exact"}


# Samples of the same noise, and kept results


def test_samples_do_not_depend_on_their_batches():
    reference = ReferenceSet(pixels(30, (1, 6, 6)))
    wiener = Wiener(r=4).bind(reference)
    whole, parts = (SameNoise(reference, num_steps=4, batch_size=size).draw(wiener, 7) for size in (7, 3))
    assert whole.std(0).max() > 0.1
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-3)  # float32 keeps latents of size 4·80 to 2e-5.


class Counted(Exact):
    """Counts its calls; no setting tells them."""

    calls = 0

    def _posterior_mean(self, z, t, x_source, generator):
        Counted.calls += 1
        return super()._posterior_mean(z, t, x_source, generator)


def test_stored_samples_serve_the_same_settings_alone_and_do_not_depend_on_their_number(tmp_path):
    images = pixels(20, (1, 4, 4))
    options = {"num_steps": 3, "batch_size": 3, "seed": 0, "grid": NoiseGrid(0.1, 2.0), "process": EDM()}
    drawn = []

    def calls(num=4, images=images, index=None, **change):
        reference, before = ReferenceSet(images, index or TorchIndex()), Counted.calls
        source = SameNoise(reference, **{**options, **change})
        drawn.append(source.kept(tmp_path, {"own": Counted().bind(reference)}, num)["own"])
        assert drawn[-1].shape == (num, 1, 4, 4)
        return Counted.calls - before

    changes = [{}, {"num": 5}, {"num_steps": 4}, {"batch_size": 4}, {"seed": 1}, {"grid": NoiseGrid(0.1, 3.0)}]
    changes += [{"grid": NoiseGrid(0.2, 2.0)}, {"grid": NoiseGrid(0.1, 2.0, 5.0)}, {"process": VP()}]
    changes += [{"process": VP(beta_d=10.0)}, {"images": images.flip(0)}, {"index": TorchIndex("float32")}]
    for change in changes:
        assert calls(**change) > 0, change
        assert calls(**change) == 0, change
    four, again, five = drawn[:3]
    assert torch.equal(four, again)
    torch.testing.assert_close(four, five[:4])


def test_results_are_found_again_with_the_same_settings_alone(tmp_path):
    def kept(settings):
        columns = {"name": str, "t": float, "mse": float}
        return KeptResults(tmp_path / "new" / "rows.csv", columns, ("name", "t"), settings)

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
