"""Training on latents: a lossless linear autoencoder gives what pixels give; samples are decoded; bad input."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from lit_knn.common.errors import InputError
from lit_knn.data import Digits, Latents, Prepared
from lit_knn.data.autoencoders import PCA, Autoencoder
from lit_knn.data.encoding import encode_images
from lit_knn.data.prepared_writer import prepare
from lit_knn.estimators import Exact
from lit_knn.figures import captioned, image_grid
from lit_knn.reference.row_view import RowView
from main import main
from tests import ROOT
from tests.image_files import image_folder


def set_up(data):
    data.setup()
    return data


def test_all_components_give_images_and_means_of_pixels():
    pixels, latents = set_up(Digits()), set_up(Latents(Digits(), PCA((1, 8, 8))))
    code, everything = latents.autoencoder, torch.arange(1797)
    images = pixels.reference.gather(everything)
    torch.testing.assert_close(
        code.decode(latents.reference.gather(everything)), images, atol=1e-5, rtol=0
    )
    assert torch.equal(latents.image_reference.gather(everything), images)
    assert torch.equal(latents.reference.labels, torch.from_numpy(load_digits().target))
    t = torch.linspace(0.3, 3, 20)
    z = torch.randn(20, 1, 8, 8) * t.reshape(-1, 1, 1, 1)
    exact, of_latents = Exact().bind(pixels.reference), Exact().bind(latents.reference)
    expected = exact.posterior_mean(z, t)
    torch.testing.assert_close(
        code.decode(of_latents.posterior_mean(code.encode(z), t)), expected, atol=1e-4, rtol=0
    )


def test_held_out_latents_and_images_are_the_same_items():
    data, plain = (
        set_up(Latents(Digits(), PCA((64,), scale), held_out=100, train_images=300))
        for scale in (0.5, 1.0)
    )
    torch.testing.assert_close(2 * data.reference.images, plain.reference.images)
    pairs = {
        300: (data.reference, data.image_reference),
        100: (data.held_out_reference, data.held_out_image_reference),
    }
    for number, (latents, images) in pairs.items():
        rows = torch.arange(number)
        assert images.N == latents.N == number
        # float32 rounding of 64 products.
        torch.testing.assert_close(
            data.autoencoder.decode(latents.gather(rows)), images.gather(rows), atol=1e-5, rtol=0
        )


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_samples_are_decoded_for_files_and_distances(own_folder):
    # The samples of this estimator are training images, so that their distance tells whether they are decoded.
    code = {"class_path": "lit_knn.data.autoencoders.PCA", "init_args": {"latent_shape": [1, 8, 8]}}
    data = {"images": "lit_knn.data.Digits", "autoencoder": code, "predict_samples": 8}
    distance = {
        "class_path": "callbacks.PixelFrechetDistance",
        "init_args": {"num_samples": 300, "batch_size": 150},
    }
    trainer = {"enable_progress_bar": False, "accelerator": "cpu"}
    trainer |= {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}}}
    for command, callbacks, options in (
        ("validate", [distance], []),
        ("predict", [], ["--sample_writer.format", "npz", "--sample_writer.folder", "out"]),
    ):
        config = {
            "data": {"class_path": "Latents", "init_args": data},
            "trainer": trainer | {"callbacks": callbacks},
        }
        Path("c.yaml").write_text(yaml.safe_dump(config))
        model = [
            "--model",
            "LitEstimator",
            "--model.estimator",
            "Exact",
            "--model.sampling_steps",
            "12",
        ]
        main([command, "-c", "c.yaml", *model, *options])
    (path,) = Path("runs").rglob("fidelity.csv")
    # Of as many samples in pixels it is 0.4, and that of noise is above 10.
    assert float(path.read_text().splitlines()[1].split(",")[-1]) < 1
    images = np.load("out/samples.npz")["images"].astype(float)[..., 0]
    digits = np.rint(load_digits().images * (255 / 16))
    assert np.abs(images[:, None] - digits[None]).max((2, 3)).min(1).max() <= 2
    assert Path("out_grid.png").is_file()


def test_latents_of_prepared_file_are_held_out_with_images(tmp_path):
    prepare(image_folder(tmp_path / "source", 20, (6, 4)), tmp_path / "x.npy")
    data = set_up(Latents(Prepared(str(tmp_path / "x.npy")), Halved(), held_out=5))
    for latents, images in (
        (data.reference, data.image_reference),
        (data.held_out_reference, data.held_out_image_reference),
    ):
        rows = torch.arange(latents.N)
        assert torch.equal(latents.gather(rows), images.gather(rows)[..., ::2])
        assert isinstance(images.images, RowView)
    assert (data.reference.N, data.held_out_reference.N) == (15, 5)


class Halved(Autoencoder):
    """Every second pixel; `broken` chooses what is wrong."""

    def __init__(self, broken=""):
        self.broken = broken

    def encode(self, images):
        latents = images[..., ::2]
        return latents[:1] if self.broken == "few" else latents

    def decode(self, latents):
        return latents.repeat_interleave(1 if self.broken == "narrow" else 2, -1)


def test_an_autoencoder_of_large_images_learns_from_few():
    class Learns(Halved):
        def fit(self, images):
            self.learned = images[:, 0, 0, 0]

    class Large(Digits):
        def load(self):
            return (torch.arange(3000) // 12).byte().reshape(-1, 1, 1, 1).expand(
                -1, 1, 128, 128
            ).contiguous(), None

    # 128 MB hold 2,048 of them, which come from the whole set.
    assert set_up(Latents(Large(), own := Learns())).reference.N == 3000
    assert len(own.learned) == 2048
    assert own.learned.max() == 249 / 127.5 - 1


def test_latents_in_a_file_are_compared_with_the_images(tmp_path):
    latents = encode_images(set_up(Digits()).reference, Halved())
    path = str(tmp_path / "latents.npy")
    np.save(path, latents)
    assert torch.equal(
        set_up(Latents(Digits(), Halved(), path=path)).reference.gather(torch.arange(5)),
        latents[:5],
    )
    for wrong, words in (
        (latents[1:], "holds 1796 latents for 1797 images"),
        # Ranks that take turns leave both ends of an even number of latents in place.
        (
            torch.cat([latents[:1], latents[1:-1].flip(0), latents[-1:]]),
            "its latents .* of the images in their order",
        ),
        (latents[..., 1:], "its latents are not those of the images"),
    ):
        np.save(path, wrong)
        with pytest.raises(InputError, match=f"Halved: data.path=.*{words}"):
            set_up(Latents(Digits(), Halved(), path=path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Latents(Digits(), Halved("few")),
            "encode returned 1 latents for 256 images",
        ),
        (
            lambda: Latents(Digits(), Halved("narrow")),
            r"decode must return images of shape \(2, 1, 8, 8\) for 2",
        ),
        (lambda: Latents(Digits(), Halved(), hflip=True), r"data\.hflip=true would mirror latents"),
        (
            lambda: Latents(Digits(), Halved(), sharded=True),
            r"data\.sharded=true does not work with Latents",
        ),
        (lambda: Latents(Digits(held_out=5), Halved()), r"data\.images\.held_out=5 is not used"),
        (
            lambda: Latents(Digits(), PCA((65,))),
            "has 65 components, but there are 1797 images of 64 values",
        ),
    ],
)
def test_bad_autoencoders_and_options_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make().setup()


def test_a_training_on_latents_shows_images(own_folder, capsys):
    grid = {
        "class_path": "lit_knn.callbacks.SampleGrid",
        "init_args": {"num_samples": 4, "num_steps": [2]},
    }
    trainer = {
        "callbacks": [grid],
        "enable_progress_bar": False,
        "max_steps": 1,
        "val_check_interval": 1,
    }
    Path("grid.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    data = ["--data", str(ROOT / "configs/data/digits_latents.yaml"), "--data.val_images", "9"]
    small = ["-c", "grid.yaml", *data, "--model.net.channels", "8"]
    main(["fit", "-c", str(ROOT / "configs/table2/digits_conditional.yaml"), *small])
    (path,) = Path("runs").rglob("samples/*.png")
    expected = captioned(image_grid(torch.zeros(4, 1, 8, 8)), "4 samples, step 1")
    assert Image.open(path).size[::-1] == expected.shape[1:]
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(ROOT / "configs/table2/digits.yaml"), *small])
    assert "augmentation would warp latents, not images" in capsys.readouterr().err
