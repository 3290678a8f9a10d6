"""`predict` with a published network from the command line draws EDM's samples, also class by class."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.common.tables import read_rows
from lit_knn.nets import NCSNpp
from lit_knn.sampling.loading import load_network
from lit_knn.sampling.samplers import seeded_noise
from main import main
from tests import ROOT
from tests.image_files import encoded, pixels, write_zip
from tests.networks import small_published, write_published

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
NAMES = ["uncond_vp", "cond_ve", "cond_adm"]
STEPS, SAMPLES = 4, 6

missing = pytest.mark.skipif(
    not GENUINE.is_dir(), reason="no ../shared/data/edm-pickles with networks pickled by NVIDIA's code"
)
FILES = [pytest.param("own", marks=pytest.mark.slow if GENUINE.is_dir() else ())]
FILES += [pytest.param(name, marks=missing) for name in NAMES]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own_with_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_zip(tmp_path / "images.zip", {f"{i:04d}.png": encoded(pixels(16, 16, 3)) for i in range(8)})


def network_file(name):
    if name in NAMES:
        return GENUINE / f"{name}.pkl"
    net = small_published(NCSNpp, image_size=16, num_classes=3)
    for layer in net.modules():  # weights of ordinary sizes, or pictures would be black and white
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return write_published("edm.pkl", net, use_fp16=True)


def predict(path, folder, *options):
    """Run the command and return the pictures it writes, (samples, 16, 16, 3)."""
    args = ["predict", "--model", "LitEstimator", "--model.estimator", "Network", "--model.estimator.path", str(path)]
    args += ["--model.sampling_steps", str(STEPS), "--data", "ImageFiles", "--data.path", "images.zip"]
    args += ["--data.predict_samples", str(SAMPLES), "--data.batch_size", "4", *options]
    args += ["--sample_writer.folder", folder]
    args += ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    main(args)
    names = [f"{seed:06d}.png" for seed in range(SAMPLES)]
    assert {path.name for path in Path(folder).iterdir()} - {"classes.csv"} == {*names, "grid.png"}
    return np.stack([np.asarray(Image.open(Path(folder, name))) for name in names]).astype(int)


def heun(path, labels):
    """Make pictures with EDM's Algorithm 1 (Karras et al. 2022) in float64 and the file's network."""
    denoiser = load_network(path)
    i = torch.arange(STEPS, dtype=torch.float64)
    levels = (80 ** (1 / 7) + i / (STEPS - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    x = seeded_noise(range(SAMPLES), (3, 16, 16)).double() * levels[0]
    for t, t_next in zip(levels, [*levels[1:], torch.tensor(0.0)], strict=True):
        slope = (x - denoiser(x, t, labels).double()) / t
        x_next = x + (t_next - t) * slope
        if t_next > 0:
            slope_next = (x_next - denoiser(x_next, t_next, labels).double()) / t_next
            x_next = x + (t_next - t) * (slope + slope_next) / 2
        x = x_next
    return (x * 127.5 + 127.5).round().clamp(0, 255).permute(0, 2, 3, 1).numpy().astype(int)


def distances(pictures, others):
    return np.abs(pictures - others).mean(axis=(1, 2, 3))


@pytest.mark.parametrize("name", FILES)
def test_predict_writes_what_the_networks_own_sampler_draws(name):
    path = network_file(name)
    known = load_network(path).model.num_classes
    pictures = predict(path, "out")
    assert pictures.std() > 10  # not blank
    # Each seed has a class; a network without classes gets none.
    choices = [torch.full((SAMPLES,), label) for label in range(known)] or [None]
    apart = np.stack([distances(pictures, heun(path, labels)) for labels in choices])
    assert apart.min(0).max() < 0.05
    if known:
        drawn = apart.argmin(0)
        assert len(set(drawn)) > 1
        assert [int(row["class"]) for row in read_rows(Path("out/classes.csv"))] == drawn.tolist()
        assert np.median(np.sort(apart, 0)[1]) > 0.2  # pictures of different classes differ
        chosen = predict(path, "chosen", "--model.sampling_class", str(known - 1))
        assert distances(chosen, heun(path, choices[-1])).max() < 0.05
