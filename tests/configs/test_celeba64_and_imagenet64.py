"""The runs at 64x64, from a folder of images to a trained network, at a size small enough for a test."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lit_knn.commands.prepare import main as prepare
from lit_knn.data.prepared import read_prepared
from main import main, make_cli
from tests import ROOT

CONFIGS = ROOT / "configs"
N, LISTS, NPROBE = 120, 44, 1  # c = 4·sqrt(N) and at least c/50, as in the paper for 202,599 and 1,281,167
SMALL = {
    "celeba64": ["--model.net.channels", "16"],
    "imagenet64": ["--model.net.channels", "16", "--model.net.head_width", "16", "--model.net.attention_at", "[8]"],
}
STEPS = 3


@pytest.fixture
def smooth_images(tmp_path):
    """Pictures of a few colours, in one folder per class; their width is 4/3 of their height."""
    rng = np.random.default_rng(0)
    for i in range(N):
        folder = tmp_path / "source" / f"n{i % 3:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        colours = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
        colours.resize((96, 72), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.jpg")
    return tmp_path / "source"


@pytest.mark.filterwarnings("ignore:120 images are few")
@pytest.mark.parametrize("name", ["celeba64", pytest.param("imagenet64", marks=pytest.mark.slow)])
def test_a_run_trains_and_a_second_one_maps_the_index_of_the_first(name, smooth_images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = ["--rgb", "--labels-from-folders"] if name == "imagenet64" else []
    prepare([str(smooth_images), f"data/{name}.npy", "--size", "64", "--center-crop", *labels])
    assert (read_prepared(f"data/{name}.npy").labels is not None) == bool(labels)
    # The runs' pictures need 64 samples each, and these would take longer than all steps.
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [], "enable_progress_bar": False}}))
    args = ["fit", "-c", str(CONFIGS / name / "ict_knn.yaml"), "-c", "small.yaml", "--trainer.accelerator", "cpu"]
    args += ["--data.index", "FaissIndex", "--data.index.factory", f"IVF{LISTS},SQ8"]
    args += ["--data.index.nprobe", str(NPROBE), "--data.index.lossless", "true"]
    args += ["--data.index.cache_dir", "runs/index_cache", *SMALL[name]]
    args += ["--model.net.blocks", "1", "--model.net.multipliers", "[1, 1, 1, 1]", "--model.estimator.k", "32"]
    args += ["--model.estimator.n", "8", "--data.batch_size", "4", "--data.val_images", "4"]
    # Without instructions for bfloat16, a convolution would take 60 times as long.
    args += ["--trainer.precision", "32-true", "--trainer.accumulate_grad_batches", "1"]
    args += ["--trainer.limit_train_batches", str(STEPS)]
    args += ["--trainer.val_check_interval", str(STEPS), "--trainer.enable_model_summary", "false"]
    main([*args, "--trainer.max_steps", str(STEPS)])
    (index,) = Path("runs/index_cache").glob("*.index")
    built = index.stat()
    second = make_cli([*args, "--trainer.max_steps", "1"])
    checkpoint = torch.load(f"runs/{name}/knn_0/checkpoints/last.ckpt", weights_only=False)
    assert (checkpoint["global_step"], checkpoint["images_seen"]) == (STEPS, STEPS * 4)
    assert checkpoint["image_shape"] == (3, 64, 64)
    assert [*Path("runs/index_cache").glob("*.index")] == [index]
    assert built.st_size > N * 3 * 64 * 64
    # Another build would be another file.
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    assert str(index.resolve()) in Path("/proc/self/maps").read_text()
    assert second.trainer.global_step == 1  # Until here the second run keeps its index.
