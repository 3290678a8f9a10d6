"""Agreement of estimators with trained networks: the measures and the callback."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import r2_score

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
from tests.networks import write_own
from tests.toys import pixels

RUN = str(ROOT / "configs" / "figure5" / "digits.yaml")
SMALL_UNET = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
NET = {"class_path": "lit_knn.nets.UNet", "init_args": {"in_channels": 1, **SMALL_UNET}}
COLOUR = {"class_path": "lit_knn.nets.UNet", "init_args": {"in_channels": 3, **SMALL_UNET}}
ONE_SAMPLE = {"class_path": "lit_knn.estimators.OneSample"}


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
    torch.manual_seed(0)
    wanted = 0.3 + torch.randn(7, 2, 3, 5)
    outputs = 0.8 * wanted + 0.4 * torch.randn(7, 2, 3, 5) - 0.1
    found = agreement(outputs, wanted)
    for row, (y, w) in enumerate(
        zip(outputs.flatten(1).double().numpy(), wanted.flatten(1).double().numpy(), strict=True)
    ):
        assert found.mse[row].item() == pytest.approx(((y - w) ** 2).mean(), rel=1e-12)
        assert found.r2[row].item() == pytest.approx(r2_score(w, y), rel=1e-10)
        assert found.pearson_r[row].item() == pytest.approx(np.corrcoef(y, w)[0, 1], rel=1e-10)
        assert found.pearson_r2[row].item() == pytest.approx(np.corrcoef(y, w)[0, 1] ** 2, rel=1e-10)


def test_r2_sees_contrast_and_brightness_and_the_correlation_does_not():
    x = torch.randn(3, 1, 4, 4).double()
    found = agreement(0.5 * x + 2, x)
    assert found.pearson_r.tolist() == pytest.approx([1.0] * 3)
    assert (found.r2 < 0).all()
    # The mean of an image explains none of its variance.
    flat = agreement(x.mean((1, 2, 3), keepdim=True).expand_as(x), x)
    assert flat.r2.tolist() == pytest.approx([0.0] * 3, abs=1e-12)


class Scaled(Estimator):
    """The exact mean, darker by a constant: it stands in for a network, whose error is then known."""

    deterministic = True

    def __init__(self, offset):
        self.offset = offset

    def _posterior_mean(self, z, t, x_source, generator):
        return Exact().bind(self.reference).posterior_mean(z, t) + self.offset


def test_a_network_that_equals_an_estimator_agrees_wholly():
    reference, held_out = (ReferenceSet(pixels(n, (1, 6, 6))) for n in (30, 20))
    networks = {"itself": Exact().bind(reference), "darker": Scaled(-0.25)}
    estimators = {"Wiener": Wiener(r=4).bind(reference), "Exact": networks["itself"]}
    networks["darker"].bind(reference)
    sampler = SameNoise(reference, num_steps=4, batch_size=10)
    generated, samples = ({name: sampler.draw(p, 16) for name, p in parts.items()} for parts in (networks, estimators))
    sets = image_sets(networks, {"training": reference, "held_out": held_out}, generated)
    rows, same = list(compare(estimators, sets, [0.2, 2.0], 16, sampler)), same_noise(samples, generated)
    kinds = {(row["estimator"], row["network"], row["images"], row["t"]) for row in rows}
    images = ("training", "held_out", "generated")
    assert kinds == {(e, n, i, t) for e in ("Wiener", "Exact") for n in networks for i in images for t in (0.2, 2.0)}
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
    averaged = over_networks(rows)
    own = next(row for row in averaged if row["estimator"] == "Exact" and row["images"] == "training")
    assert (own["mse_low"], own["mse_high"]) == pytest.approx((0, 0.0625), abs=1e-6)
    assert own["mse"] == pytest.approx(0.03125, abs=1e-6)
    to_itself = over_networks([row for row in rows if row["network"] == "itself"])
    assert {row["estimator"] for row in nearest(to_itself)} == {"Exact"}


def test_samples_do_not_depend_on_their_number_and_start_from_the_noise_of_their_seed():
    reference = ReferenceSet(pixels(20, (1, 4, 4)))
    source = SameNoise(reference, num_steps=5, batch_size=3)
    exact = Exact().bind(reference)
    few, many = source.draw(exact, 4), source.draw(exact, 8)
    torch.testing.assert_close(few, many[:4])


class Counted(Exact):
    """Counts its calls; no setting tells them."""

    calls = 0

    def _posterior_mean(self, z, t, x_source, generator):
        Counted.calls += 1
        return super()._posterior_mean(z, t, x_source, generator)


def test_stored_samples_serve_the_same_settings_alone(tmp_path):
    images = pixels(20, (1, 4, 4))
    options = {"num_steps": 3, "batch_size": 3, "seed": 0, "grid": NoiseGrid(0.1, 2.0), "process": EDM()}

    def calls(num=4, images=images, index=None, **change):
        reference = ReferenceSet(images, index or TorchIndex())
        before = Counted.calls
        source = SameNoise(reference, **{**options, **change})
        samples = source.kept(tmp_path, {"own": Counted().bind(reference)}, num)["own"]
        assert samples.shape == (num, 1, 4, 4)
        return Counted.calls - before

    assert calls() > 0
    assert calls() == 0
    changes = [{"num_steps": 4}, {"batch_size": 4}, {"seed": 1}, {"grid": NoiseGrid(0.1, 3.0)}, {"process": VP()}]
    changes += [{"grid": NoiseGrid(0.2, 2.0)}, {"grid": NoiseGrid(0.1, 2.0, 5.0)}, {"process": VP(beta_d=10.0)}]
    changes += [{"num": 5}, {"images": images.flip(0)}, {"index": TorchIndex("float32")}]
    for change in changes:
        assert calls(**change) > 0, change
        assert calls(**change) == 0, change


def arguments(held_out=20, trainer=None, **options):
    callback = {"class_path": "lit_knn.callbacks.NetworkAgreement", "init_args": {**SMALL, **options}}
    config = {"trainer": {"enable_progress_bar": False, "callbacks": [callback], **(trainer or {})}}
    Path("small.yaml").write_text(yaml.safe_dump(config))
    data = ["--data", "Arrays", "--data.path", "images.npy", "--data.batch_size", "20", "--data.index", "TorchIndex"]
    return ["validate", "-c", RUN, "-c", "small.yaml", "--model.sampling_steps", "3", *data] + (
        ["--data.held_out", str(held_out)] if held_out else []
    )


@pytest.fixture
def _files():
    np.save("images.npy", pixels(80, (1, 8, 8)).numpy())
    write_own("one.ckpt")
    write_own("two.ckpt", seed=1)
    write_own("colour.ckpt", image_channels=3)


def table(path="results/network_agreement.csv"):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


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
    rows = table()
    keys = {(row["estimator"], row["network"], row["images"], row["t"]) for row in rows}
    points = {(i, t) for i in ("training", "held_out", "generated") for t in ("0.3", "3.0")} - {("generated", "3.0")}
    assert keys == {(e, "one", *point) for e in ("Patch", "Wiener", "Exact") for point in points}
    calls.clear()
    caplog.set_level("INFO", logger="pytorch_lightning.utilities.rank_zero")
    main(arguments(networks={**SMALL["networks"], "two": network("two.ckpt")}))
    # Only the check of two equal calls, the missing comparison, and those of the new network: nothing is sampled again.
    assert sum(calls) == 2 + 12 + 12 * 3 * 2
    assert table()[: len(rows)] == rows
    assert len(table()) == 3 * 2 * 3 * 2
    assert "nearest" in caplog.text
    (folder,) = Path("runs/figure5_digits").glob("estimator_*")  # the first run had no result of its own
    assert {row["network"] for row in table(folder / "same_noise.csv")} == {"one", "two"}
    assert {row["num_networks"] for row in table(folder / "network_agreement.csv") if row["images"] != "generated"} == {
        "2"
    }
    for name in ("network_agreement", "same_noise", "same_noise_one"):
        assert np.asarray(Image.open(folder / f"{name}.png").convert("L")).std() > 5
    # Comparisons over another number of images are others.
    for number, images in enumerate((5, 4), start=1):
        # The same latents are sampled for both.
        main(arguments(num_images=images, images=["training"], num_latents=6))
        assert len(table()) == 3 * 2 * 3 * 2 + 3 * 2 * number


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"held_out": 0}, ["held_out", "data.held_out"]),
        ({"images": ["imagined"]}, ["imagined", "training, held_out, generated"]),
        ({"networks": {"one": network(net={**NET, "init_args": {**NET["init_args"], "channels": 4}})}}, ["one.ckpt"]),
        ({"num_images": 21}, ["num_images=21 is more than the 20 held-out images"]),
        (
            {"networks": {"colour": network("colour.ckpt", COLOUR)}},
            ["networks.colour cannot be used", "(1, 8, 8)"],
        ),
        ({"estimators": {"source": ONE_SAMPLE}}, ["estimators.source cannot be used", "x_source"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_ends_in_one_line_before_long_work(options, words, calls, capsys):
    with pytest.raises(SystemExit):
        main(arguments(**options))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in line
    assert sum(calls) <= 2
    assert not Path("results/network_agreement.csv").exists()
