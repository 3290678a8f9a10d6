"""Agreement of estimators with trained networks: the measures and the callback."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import r2_score

from lit_knn.common.tables import read_rows
from lit_knn.estimators import Estimator, Exact, PatchPosterior, Wiener
from lit_knn.index import TorchIndex
from lit_knn.metrics.agreement import agreement
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.metrics.network_agreement import compare, image_sets, nearest, over_networks
from lit_knn.metrics.same_noise import SameNoise, same_noise
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.theory.noise import EDM, VP
from main import main
from tests import ROOT
from tests.command_lines import refusal_of
from tests.networks import write_own
from tests.toys import pixels

TABLE = Path("results/network_agreement.csv")
RUN = str(ROOT / "configs" / "figure5" / "digits.yaml")
SMALL_UNET = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
NET = {"class_path": "lit_knn.nets.UNet", "init_args": {"in_channels": 1, **SMALL_UNET}}
COLOUR = {"class_path": "lit_knn.nets.UNet", "init_args": {"in_channels": 3, **SMALL_UNET}}


def network(path="one.ckpt", net=NET):
    return {"class_path": "lit_knn.estimators.Network", "init_args": {"path": path, "net": net}}


SMALL = {
    "networks": {"one": network()},
    "estimators": {
        "Patch": {"class_path": "lit_knn.estimators.PatchPosterior", "init_args": {"size": 3}},
        "Wiener": {"class_path": "lit_knn.estimators.Wiener", "init_args": {"r": 8}},
    },
    "noise_levels": [0.3, 3.0],
    "folder": "results",
    "num_images": 12,
    "num_latents": 5,
    "batch_size": 8,
}


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def test_samples_do_not_depend_on_their_batches():
    reference = ReferenceSet(pixels(30, (1, 6, 6)))
    wiener = Wiener(r=4).bind(reference)
    whole, parts = (SameNoise(reference, num_steps=4, batch_size=size).draw(wiener, 7) for size in (7, 3))
    assert whole.std(0).max() > 0.1
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-3)  # float32 keeps latents of size 4·80 to 2e-5.


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
    own = next(row for row in over_networks(rows) if row["estimator"] == "Exact" and row["images"] == "training")
    assert (own["mse"], own["mse_low"], own["mse_high"]) == pytest.approx((0.03125, 0, 0.0625), abs=1e-6)
    to_itself = over_networks([row for row in rows if row["network"] == "itself"])
    assert {row["estimator"] for row in nearest(to_itself)} == {"Exact"}


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


def arguments(held_out=20, **options):
    callback = {"class_path": "lit_knn.callbacks.NetworkAgreement", "init_args": {**SMALL, **options}}
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": {"enable_progress_bar": False, "callbacks": [callback]}}))
    data = ["--data", "Arrays", "--data.path", "images.npy", "--data.batch_size", "20", "--data.index", "TorchIndex"]
    data += ["--data.held_out", str(held_out)] if held_out else []
    return ["validate", "-c", RUN, "-c", "small.yaml", "--model.sampling_steps", "3", *data]


@pytest.fixture
def _files():
    np.save("images.npy", pixels(80, (1, 8, 8)).numpy())
    write_own("one.ckpt")
    write_own("two.ckpt", seed=1)
    write_own("colour.ckpt", image_channels=3)


@pytest.fixture
def calls(monkeypatch):
    """The number of posterior means that the tests' run asked of the patch estimator."""
    seen, original = [], PatchPosterior.posterior_mean

    def watched(self, z, t, *args, **kwargs):
        seen.append(len(z))
        return original(self, z, t, *args, **kwargs)

    monkeypatch.setattr(PatchPosterior, "posterior_mean", watched)
    return seen


@pytest.mark.usefixtures("_files")
def test_a_run_writes_tables_and_pictures_and_the_next_one_measures_nothing_again(calls, monkeypatch, caplog):
    # The first run stops before its last comparison, which is of the generated images at t = 3.
    with monkeypatch.context() as patch:
        original = NoisyLatents.batch

        def stop(self, numbers, t):
            assert t < 1 or self.reference.N in (60, 20)
            return original(self, numbers, t)

        patch.setattr(NoisyLatents, "batch", stop)
        with pytest.raises(SystemExit):
            main(arguments())
    rows = read_rows(TABLE)
    keys = {(row["estimator"], row["images"], row["t"]) for row in rows}
    expected = set(product(("Patch", "Wiener", "Exact"), ("training", "held_out", "generated"), ("0.3", "3.0")))
    assert keys == {key for key in expected if key[1:] != ("generated", "3.0")}
    calls.clear()
    caplog.set_level("INFO", logger="pytorch_lightning.utilities.rank_zero")
    main(arguments(networks={**SMALL["networks"], "two": network("two.ckpt")}))
    # Only the check of two equal calls, the missing comparison, and those of the new network: nothing is sampled again.
    assert sum(calls) == 2 + 12 + 12 * 3 * 2
    assert read_rows(TABLE)[: len(rows)] == rows
    assert len(read_rows(TABLE)) == 2 * len(expected)
    assert "nearest" in caplog.text
    (folder,) = Path("runs/figure5_digits").glob("estimator_*")  # the first run had no result of its own
    assert {row["network"] for row in read_rows(folder / "same_noise.csv")} == {"one", "two"}
    averaged = read_rows(folder / "network_agreement.csv")
    assert {row["num_networks"] for row in averaged if row["images"] != "generated"} == {"2"}
    for name in ("network_agreement", "same_noise", "same_noise_one"):
        assert np.asarray(Image.open(folder / f"{name}.png").convert("L")).std() > 5
    # Comparisons over another number of images are others, even if the same latents are sampled for both.
    for number, images in enumerate((5, 4), start=1):
        main(arguments(num_images=images, images=["training"], num_latents=6))
        assert len(read_rows(TABLE)) == 2 * len(expected) + 3 * 2 * number


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"held_out": 0}, ["held_out", "data.held_out"]),
        ({"images": ["imagined"]}, ["imagined", "training, held_out, generated"]),
        ({"num_images": 21}, ["num_images=21 is more than the 20 held-out images"]),
        ({"networks": {"colour": network("colour.ckpt", COLOUR)}}, ["networks.colour cannot be used", "(1, 8, 8)"]),
    ],
)
def test_bad_input_ends_in_one_line_before_long_work(options, words, calls, capsys):
    line = refusal_of(arguments(**options), capsys)
    for word in words:
        assert word in line
    assert sum(calls) <= 2
    assert not TABLE.exists()
