"""Training on latents: a lossless linear autoencoder gives what pixels give; samples are decoded; bad input."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from lit_knn.common.errors import InputError
from lit_knn.data import Digits, Latents
from lit_knn.data.autoencoders import PCA, Autoencoder
from lit_knn.data.latents import encode_images
from lit_knn.estimators import Exact
from lit_knn.figures import captioned, image_grid
from lit_knn.sampling.samplers import heun_sampler
from main import main
from tests import ROOT

FULL = {"class_path": "lit_knn.data.autoencoders.PCA", "init_args": {"latent_shape": [1, 8, 8]}}
LATENTS = {"class_path": "lit_knn.data.Latents", "init_args": {"images": "lit_knn.data.Digits", "autoencoder": FULL}}
LATENTS["init_args"]["predict_samples"] = 8


def test_all_components_give_the_images_posterior_means_and_samples_of_pixels():
    pixels, latents = Digits(), Latents(Digits(), PCA((1, 8, 8)))
    pixels.setup()
    latents.setup()
    code = latents.autoencoder
    images = pixels.reference.gather(torch.arange(1797))
    torch.testing.assert_close(code.decode(latents.reference.gather(torch.arange(1797))), images, atol=1e-5, rtol=0)
    assert torch.equal(latents.image_reference.gather(torch.arange(9)), images[:9])
    assert torch.equal(latents.reference.labels, torch.from_numpy(load_digits().target))
    z = torch.randn(20, 1, 8, 8) * torch.linspace(0.3, 3, 20).reshape(-1, 1, 1, 1)
    t = torch.linspace(0.3, 3, 20)
    exact, of_latents = Exact().bind(pixels.reference), Exact().bind(latents.reference)
    expected = exact.posterior_mean(z, t)
    torch.testing.assert_close(code.decode(of_latents.posterior_mean(code.encode(z), t)), expected, atol=1e-4, rtol=0)
    # The noise of latents, turned back to pixels, begins at the mean image, where latents are 0.
    noise = torch.randn(6, 1, 8, 8)
    decoded = code.decode(heun_sampler(of_latents.posterior_mean, noise, 10))
    turned = code.decode(80 * noise) / 80
    torch.testing.assert_close(decoded, heun_sampler(exact.posterior_mean, turned, 10), atol=1e-3, rtol=0)


def test_held_out_latents_and_images_are_the_same_items():
    data = Latents(Digits(), PCA((1, 8, 8)), held_out=100, train_images=300)
    data.setup()
    pairs = {300: (data.reference, data.image_reference), 100: (data.held_out_reference, data.held_out_image_reference)}
    for number, (latents, images) in pairs.items():
        rows = torch.arange(number)
        assert images.N == latents.N == number
        torch.testing.assert_close(
            data.autoencoder.decode(latents.gather(rows)), images.gather(rows), atol=1e-5, rtol=0
        )


def run(*args, data, tmp_path, callbacks=None):
    listed = [{"class_path": f"callbacks.{name}", "init_args": options} for name, options in (callbacks or {}).items()]
    config = {"data": data, "trainer": {"callbacks": listed}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu", "--trainer.logger", "CSVLogger"]
    main([*args, "-c", str(tmp_path / "c.yaml"), *quiet, "--trainer.logger.save_dir", "runs"])


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_samples_are_decoded_for_files_and_distances(tmp_path, monkeypatch):
    # The samples of this estimator are training images, so that their distance tells whether they are decoded.
    monkeypatch.chdir(tmp_path)
    model = ["--model", "LitEstimator", "--model.estimator", "Exact", "--model.sampling_steps", "12"]
    pixel = {"PixelFrechetDistance": {"num_samples": 300, "batch_size": 150}}
    run("validate", *model, data=LATENTS, tmp_path=tmp_path, callbacks=pixel)
    (path,) = Path("runs").rglob("fidelity.csv")
    # Of as many samples in pixels it is 0.4, and that of noise is above 10.
    assert float(path.read_text().splitlines()[1].split(",")[-1]) < 1
    writer = ["--sample_writer.format", "npz", "--sample_writer.folder", "out"]
    run("predict", *model, *writer, data=LATENTS, tmp_path=tmp_path)
    images = np.load("out/samples.npz")["images"].astype(float)[..., 0]
    digits = np.rint(load_digits().images * (255 / 16))
    nearest = np.abs(images[:, None] - digits[None]).max((2, 3)).min(1)
    assert nearest.max() <= 2
    assert Path("out/grid.png").is_file()


class Halved(Autoencoder):
    """Every second pixel; `broken` chooses what is wrong."""

    def __init__(self, broken=""):
        self.broken = broken

    def encode(self, images):
        latents = images[..., ::2]
        return {"": latents, "few": latents[:1], "nan": latents / 0 * 0, "text": "latents"}[self.broken]

    def decode(self, latents):
        return latents.repeat_interleave(2, -1)


def test_latents_in_a_file_are_compared_with_the_images(tmp_path):
    data = Digits()
    data.setup()
    latents = encode_images(data.reference, Halved())
    np.save(tmp_path / "latents.npy", latents)
    read = Latents(Digits(), Halved(), path=str(tmp_path / "latents.npy"))
    read.setup()
    assert torch.equal(read.reference.gather(torch.arange(5)), latents[:5])
    for name, wrong, words in (
        ("few", latents[1:], "holds 1796 latents for 1797 images"),
        ("other", latents.flip(0), "its first and last latents are not those of the images"),
        ("shape", latents[..., 1:], "its first and last latents are not those of the images"),
    ):
        np.save(tmp_path / f"{name}.npy", wrong)
        with pytest.raises(InputError, match=f"Halved: data.path=.*{words}"):
            Latents(Digits(), Halved(), path=str(tmp_path / f"{name}.npy")).setup()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Latents(Digits(), Halved("few")), r"encode must return a tensor of 256 latents, got \(1, 1, 8, 4\)"),
        (lambda: Latents(Digits(), Halved("nan")), "Halved: encode returned NaN or infinite values"),
        (lambda: Latents(Digits(), Halved("text")), "encode must return a tensor of 256 latents, got str"),
        (lambda: Latents(Digits(), Halved(), hflip=True), r"data\.hflip=true would mirror latents"),
        (lambda: Latents(Digits(), Halved(), sharded=True), r"data\.sharded=true does not work with Latents"),
        (lambda: Latents(Digits(held_out=5), Halved()), r"data\.images\.held_out=5 is not used"),
        (lambda: Latents(Digits(), PCA((65,))), "has 65 components, but there are 1797 images of 64 values"),
    ],
)
def test_bad_autoencoders_and_options_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make().setup()


def test_a_training_on_latents_shows_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grid = {"class_path": "lit_knn.callbacks.SampleGrid", "init_args": {"num_samples": 4, "num_steps": [2]}}
    Path("grid.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [grid], "enable_progress_bar": False}}))
    data = ["--data", str(ROOT / "configs/data/digits_latents.yaml"), "--data.val_images", "9"]
    small = ["-c", "grid.yaml", *data, "--model.net.channels", "8"]
    steps = ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    main(["fit", "-c", str(ROOT / "configs/table2/digits_conditional.yaml"), *small, *steps])
    (path,) = Path("runs").rglob("samples/*.png")
    expected = captioned(image_grid(torch.zeros(4, 1, 8, 8)), "4 samples, step 1")
    assert Image.open(path).size[::-1] == expected.shape[1:]
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs/table2/digits.yaml"), *small])
    assert "augmentation would warp latents, not images" in capsys.readouterr().err
