"""Latents of prepared images by an autoencoder of diffusers: values, mirror images, interruptions, runs, refusals."""

import csv
import json
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import scipy.linalg
import torch
import yaml

import lit_knn
from lit_knn.commands.plan_data import plan_data
from lit_knn.commands.probe import draw_latents
from lit_knn.commands.trainer import Trainer
from lit_knn.common.settings import describe
from lit_knn.data import Images, Latents, Prepared
from lit_knn.data.autoencoders import AutoencoderKL
from lit_knn.data.latents_writer import prepare_latents
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare
from lit_knn.estimators import KNN
from lit_knn.modules.estimator import LitEstimator
from main import main
from tests.image_files import image_folder, refusal

FACTOR, SHIFT = 0.7, 0.1


def random_vae(path, seed=0, **options):
    """Save a small autoencoder of diffusers; latents of 8x8 images are 4x4x4."""
    torch.manual_seed(seed)
    options = {"scaling_factor": FACTOR, "shift_factor": SHIFT, **options}
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[4, 8],
        norm_num_groups=2,
        layers_per_block=1,
        **options,
    )
    vae.save_pretrained(path)
    return vae.eval().requires_grad_(False)


@pytest.fixture
def files(tmp_path):
    """150 prepared images of 8x8 in four classes, images.npy, and a random autoencoder, vae."""
    prepare(image_folder(tmp_path / "source", 150, (8, 8)), tmp_path / "images.npy")
    return tmp_path, random_vae(tmp_path / "vae", latent_channels=4)


def model_space(path):
    return torch.from_numpy(np.load(path)).float() / 127.5 - 1


def test_latents_and_samples_are_those_of_diffusers(files):
    folder, vae = files
    images = model_space(folder / "images.npy")
    coder = AutoencoderKL(str(folder / "vae"), scale=0.5)
    latents = coder.encode(images)
    posterior = vae.encode(images).latent_dist
    # float32 rounding: another number of images at a time.
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(latents, (posterior.mode() - SHIFT) * FACTOR * 0.5, **close)
    expected = vae.decode(latents / (FACTOR * 0.5) + SHIFT).sample
    torch.testing.assert_close(coder.decode(latents), expected, **close)
    # Without factors in its configuration an autoencoder has those of Stable Diffusion.
    plain = random_vae(folder / "plain", scaling_factor=0.18215, shift_factor=None)
    expected = plain.encode(images[:3]).latent_dist.mode() * 0.18215
    torch.testing.assert_close(
        AutoencoderKL(str(folder / "plain")).encode(images[:3]), expected, **close
    )


def test_a_draw_depends_on_seed_and_image_alone(files):
    folder, vae = files
    images = model_space(folder / "images.npy")
    drawn = AutoencoderKL(str(folder / "vae"), draw_seed=3).encode(images)
    order = torch.randperm(150)
    again = AutoencoderKL(str(folder / "vae"), draw_seed=3).encode(images[order])
    torch.testing.assert_close(again, drawn[order], atol=1e-5, rtol=1e-5)
    other = AutoencoderKL(str(folder / "vae"), draw_seed=4).encode(images)
    posterior = vae.encode(images).latent_dist
    noise, other_noise = (
        (z / FACTOR + SHIFT - posterior.mean) / posterior.std for z in (drawn, other)
    )
    # 9,600 values: a standard error of 0.01 for the mean and 0.007 for the standard deviation; five of them.
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.035
    assert abs((noise * other_noise).mean()) < 0.05


def test_a_file_has_latents_of_images_and_mirror_images(files):
    folder, vae = files
    command = ["prepare", str(folder / "images.npy"), str(folder / "latents.npy")]
    main([*command, "--autoencoder", str(folder / "vae"), "--latent-scale", "2"])
    images = model_space(folder / "images.npy")
    both = torch.cat([images, images.flip(-1)])
    expected = (vae.encode(both).latent_dist.mode() - SHIFT) * FACTOR * 2
    stored = np.load(folder / "latents.npy")
    np.testing.assert_allclose(stored, expected, atol=1e-5, rtol=1e-5)
    assert (
        verify(folder / "latents.npy").labels
        == read_prepared(folder / "images.npy").labels.tolist()
    )

    told = json.loads((folder / "latents.json").read_text())["latents"]
    assert (told["images"], told["path"]) == ("images.npy", "vae")
    assert (told["factor"], told["shift"]) == (FACTOR * 2, SHIFT)
    assert told["standard_deviation"] == pytest.approx(stored.std(), rel=1e-5)
    assert told["mean"] == pytest.approx(stored.mean(), rel=1e-4)


def test_an_interrupted_encoding_ends_with_the_same_file(files, monkeypatch, capsys):
    folder, _ = files
    coder = AutoencoderKL(str(folder / "vae"))
    whole = prepare_latents(folder / "images.npy", folder / "whole.npy", coder, half=True)
    encode, calls = AutoencoderKL.encode, []

    def killed(self, images):
        calls.append(len(images))
        if len(calls) == 4:  # The first call asks for the shape.
            raise KeyboardInterrupt
        return encode(self, images)

    monkeypatch.setattr(AutoencoderKL, "encode", killed)
    out = folder / "x.npy"
    with pytest.raises(KeyboardInterrupt):
        prepare_latents(folder / "images.npy", out, coder, half=True)
    assert not out.exists()
    monkeypatch.undo()
    shutil.copy(folder / "x.npy.partial", folder / "y.npy.partial")
    shutil.copy(folder / "x.npy.partial.json", folder / "y.npy.partial.json")

    capsys.readouterr()
    assert prepare_latents(folder / "images.npy", out, coder, half=True) == whole
    assert "going on after 128 latents" in capsys.readouterr().err
    assert out.read_bytes() == (folder / "whole.npy").read_bytes()
    assert out.with_suffix(".json").read_bytes() == (folder / "whole.json").read_bytes()
    # In another way it starts again, and a finished file is not taken for one of another way.
    prepare_latents(folder / "images.npy", folder / "y.npy", AutoencoderKL(coder.path, scale=2))
    assert "starting again" in capsys.readouterr().err
    ratio = np.load(folder / "y.npy") / np.load(out).astype(np.float32)
    assert np.median(ratio) == pytest.approx(2, rel=1e-3)
    words = "was made of other images or in another way"
    assert words in refusal(prepare_latents, folder / "images.npy", out, coder)
    assert not list(folder.glob("*.partial*"))


def test_an_existing_file_of_another_way_is_refused_first(files, capsys):
    folder, _ = files
    out, command = folder / "z.npy", ["prepare", str(folder / "source"), str(folder / "z.npy")]
    command += ["--autoencoder", str(folder / "vae")]
    main(command)
    images = folder / "z.images.npy"
    before = out.read_bytes()
    # Without the images, they would be prepared again first.
    images.unlink()
    images.with_suffix(".json").unlink()
    with pytest.raises(SystemExit):
        main([*command, "--half"])
    assert "in another way" in capsys.readouterr().err
    assert not images.exists()
    main(command)
    assert images.exists()
    assert out.read_bytes() == before


def test_one_door_reads_latents_with_images_and_mirrors(files, monkeypatch):
    folder, vae = files
    coder = AutoencoderKL(str(folder / "vae"))
    prepare_latents(folder / "images.npy", folder / "half.npy", coder, half=True)
    prepare_latents(folder / "images.npy", folder / "z.npy", coder)
    stored = torch.from_numpy(np.load(folder / "z.npy"))
    # The files move together, and are seen from another folder.
    folder = folder.rename(folder.with_name("moved"))
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(AutoencoderKL, "encode", None)  # Nothing is encoded again.
    options = {"held_out": 30, "train_images": 100}
    for hflip, parts in ((False, {}), (True, {}), (False, options), (True, options)):
        data = Images("moved/z.npy", hflip=hflip, **parts)
        assert data.stored().shape == (150, 4, 4, 4)
        data.setup()
        pairs = [(data.reference, data.image_reference)]
        if parts:
            pairs.append((data.held_out_reference, data.held_out_image_reference))
        for latents, images in pairs:
            assert latents.N == images.N
            every = torch.arange(latents.N)
            expected = vae.encode(images.gather(every)).latent_dist.mode()
            torch.testing.assert_close(
                latents.gather(every), (expected - SHIFT) * FACTOR, atol=1e-5, rtol=1e-5
            )
        labels = torch.arange(150) * 4 // 150
        assert parts or torch.equal(data.reference.labels, labels.repeat(1 + hflip))
        assert sum(images.N for _, images in pairs) == (130 if parts else 150) * (1 + hflip)
        half = Images("moved/half.npy", hflip=hflip, **parts)
        half.setup()
        assert half.reference.images.dtype == torch.float16
        # float16 has 11 digits.
        every = torch.arange(half.reference.N)
        torch.testing.assert_close(
            half.reference.gather(every), data.reference.gather(every), atol=1e-6, rtol=2**-11
        )
        expected = vae.decode(stored[:2] / FACTOR + SHIFT).sample
        torch.testing.assert_close(data.autoencoder.decode(stored[:2]), expected)


@pytest.mark.parametrize("hflip", [False, True])
def test_latents_are_held_out_and_planned_for_by_images(files, hflip):
    folder, _ = files
    coder = AutoencoderKL(str(folder / "vae"))
    prepare_latents(folder / "images.npy", folder / "z.npy", coder, half=True)

    def data(**options):
        return Images(str(folder / "z.npy"), hflip=hflip, **options)

    parts = draw_latents(data(), 0.1, 1000, torch.device("cpu"))
    assert [part.reference.N for part in parts] == [135 * (1 + hflip), 15 * (1 + hflip)]
    held_out = data(held_out=15)
    held_out.setup()
    assert torch.equal(
        parts[1].reference.images[:].float(), held_out.held_out_reference.images[:].float()
    )
    trainer, model = Trainer(accelerator="cpu", logger=False), LitEstimator(KNN(k=4, n=2))
    (memory,) = plan_data(trainer, model, held_out, held_out.stored(), torch.device("cpu"))
    reference = held_out.reference
    assert memory.sizes["index"] == 4 * reference.N * reference.d
    assert any(name.startswith(f"images, {reference.N} x") for name in memory.sizes)


def distance_of_samples(checkpoint, number):
    """Fréchet distance, by SciPy, of the images that are decoded from a run's samples to those of its latents."""
    latents = torch.as_tensor(lit_knn.load(checkpoint).sample(range(number)))
    vae = diffusers.AutoencoderKL.from_pretrained("vae", low_cpu_mem_usage=False).eval()
    with torch.no_grad():
        samples = vae.decode(latents / (9 * FACTOR) + SHIFT).sample
    a, b = (x.flatten(1).double().numpy() for x in (samples, model_space("images.npy")))
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    traces = np.trace(covariances[0] + covariances[1] - 2 * root)
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + traces)


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_a_run_on_latents_shows_and_measures_images(own_folder):
    prepare(image_folder(Path("source"), 40, (8, 8)), "images.npy")
    random_vae("vae", latent_channels=4)
    prepare_latents("images.npy", "z.npy", AutoencoderKL("vae", scale=9))
    distance = {"num_samples": 16, "batch_size": 16}
    trainer = {
        "callbacks": [{"class_path": "callbacks.PixelFrechetDistance", "init_args": distance}],
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}},
        "max_steps": 2,
        "val_check_interval": 1,
    }
    net = {
        "class_path": "UNet",
        "init_args": {"in_channels": None, "channels": 4, "multipliers": [1]},
    }
    data = {"path": "z.npy", "hflip": True, "batch_size": 20, "val_images": 8, "predict_samples": 4}
    config = {
        "trainer": trainer,
        "model": {"class_path": "LitFlow", "init_args": {"net": net, "sampling_steps": 2}},
        "data": {"class_path": "Images", "init_args": data},
    }
    config["model"]["init_args"]["estimator"] = "OneSample"
    Path("c.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "-c", "c.yaml"])
    (table,) = Path("runs").rglob("fidelity.csv")
    measured = list(csv.DictReader(table.open()))[-1]["fd_pixels"]
    (checkpoint,) = Path("runs").rglob("last.ckpt")
    assert float(measured) == pytest.approx(distance_of_samples(checkpoint, 16), rel=1e-4)

    writes = ["--sample_writer.format", "npz", "--sample_writer.folder", "out"]
    main(["predict", "-c", "c.yaml", "--ckpt_path", "last", *writes])
    assert np.load("out/samples.npz")["images"].shape == (4, 8, 8, 3)
    # With other weights under the same name, a run does not go on.
    random_vae("vae", seed=1, latent_channels=4)
    with pytest.raises(SystemExit):
        main(["fit", "-c", "c.yaml", "--ckpt_path", "last", "--trainer.max_steps", "3"])


def test_results_are_kept_for_equal_weights_alone(files):
    folder, _ = files
    random_vae(folder / "other", seed=1, latent_channels=4)
    shutil.copytree(folder / "vae", folder / "copy")
    first, same, other = (
        describe(AutoencoderKL(str(folder / name))) for name in ("vae", "copy", "other")
    )
    assert first == same != other


def test_what_cannot_be_encoded_is_refused_before_long_work(files, capsys, monkeypatch):
    monkeypatch.chdir(files[0])
    images = np.load("images.npy")
    np.save("plain.npy", images)
    with pytest.raises(SystemExit):
        main(["prepare", "plain.npy", "z.npy", "--autoencoder", "nowhere"])
    assert "the autoencoder nowhere is not a folder" in capsys.readouterr().err
    assert not list(Path().glob("z.*"))

    # A decoder of this size gives 6x6 for 7x7.
    np.savez("odd.npz", images[:, :, :7, :7])
    with pytest.raises(SystemExit):
        main(["prepare", "odd.npz", "odd.npy", "--autoencoder", "vae"])
    assert "must return images of shape (1, 3, 7, 7)" in capsys.readouterr().err
    assert not Path("odd.npy").exists()

    with pytest.raises(SystemExit):
        main(["prepare", "plain.npy", "z", "--autoencoder", "vae"])
    assert "z must end in .npy" in capsys.readouterr().err
    assert not list(Path().glob("z.*"))

    main(["prepare", "plain.npy", "z.npy", "--autoencoder", "vae"])
    main(["prepare", "images.npy", "again.npy", "--autoencoder", "vae"])
    np.testing.assert_array_equal(np.load("z.images.npy"), images)
    np.testing.assert_array_equal(np.load("z.npy"), np.load("again.npy"))


def test_latents_that_do_not_fit_are_refused(files, capsys):
    folder, _ = files
    coder = AutoencoderKL(str(folder / "vae"))
    images = folder / "images.npy"
    prepare_latents(images, folder / "z.npy", coder, mirrored=False)
    assert "holds latents, not images" in refusal(read_prepared, folder / "z.npy")
    z = str(folder / "z.npy")
    assert "was written with --no-mirrored" in refusal(Images(z, hflip=True).setup)
    assert "sharded=true does not work" in refusal(Images, z, sharded=True)
    assert "encodes images of 3 channels" in refusal(coder.encode, torch.zeros(2, 1, 8, 8))

    random_vae(folder / "vae", seed=1, latent_channels=4)
    assert "order by this autoencoder" in refusal(Images(z).setup)
    assert "order by this autoencoder" in refusal(
        Latents(Prepared(str(images)), AutoencoderKL(str(folder / "vae")), z).setup
    )
    shutil.rmtree(folder / "vae")
    assert "vae is not a folder that save_pretrained" in refusal(Images(z).setup)
    images.unlink()
    images.with_suffix(".json").unlink()
    assert "images.npy, which do not exist: samples are compared with" in refusal(Images, z)
    words = "holds latents, and latents are not prepared again"
    assert words in refusal(prepare, z, folder / "again.npy")
    diffusers.AutoencoderTiny().save_pretrained(folder / "tiny")
    assert "is of class AutoencoderTiny" in refusal(AutoencoderKL(str(folder / "tiny")).loaded)

    for options, words in (
        (["--half"], "--half goes with --autoencoder"),
        (["--autoencoder", "vae", "--rgb"], "is prepared: options that change images"),
    ):
        with pytest.raises(SystemExit):
            main(["prepare", "images.npy", "x.npy", *options])
        assert words in capsys.readouterr().err


def test_draws_have_the_deviation_of_the_posterior(tmp_path):
    vae = random_vae(tmp_path, latent_channels=4)
    vae.quant_conv.bias.data[4:] -= 3  # log-variances
    vae.save_pretrained(tmp_path)
    images = torch.rand(150, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        posterior = vae.encode(images).latent_dist
    drawn = AutoencoderKL(str(tmp_path), draw_seed=3).encode(images)
    noise = (drawn / FACTOR + SHIFT - posterior.mean) / posterior.std
    # The standard deviation of n numbers errs by 1/√(2n).
    assert abs(noise.std() - 1) < 4 / (2 * noise.numel()) ** 0.5
