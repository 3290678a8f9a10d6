"""The images that benchmarks and trials at scale generate, from a few small ones."""

import numpy as np
import pytest
import torch

from benchmarks import generate_images
from benchmarks.generate_images import generated_source
from lit_knn.data.prepared import read_prepared
from tests.image_files import encoded, labels_json, pixels, write_zip


def source_images(number=30, side=12):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (number, 3, side, side), np.uint8), np.arange(number) % 3


def blends_of(images):
    """All blends in which one image has weight 1: each image, mirrored or not, at each shift."""
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    height, width = images.shape[2:]
    cuts = [padded[:, :, i : i + height, j : j + width] for i in range(9) for j in range(9)]
    return np.stack([*cuts, *(cut[..., ::-1] for cut in cuts)], 1)


def test_a_generated_image_is_near_a_shifted_source_image_of_its_label_and_no_nearer_to_others():
    images, labels = source_images()
    source = generated_source(images, labels, 40, None, None, 3)
    candidates = blends_of(images).reshape(len(images), -1, images[0].size).astype(np.float32)
    correlated = candidates - candidates.mean(2, keepdims=True)
    correlated /= np.linalg.norm(correlated, axis=2, keepdims=True)
    nearest = [(correlated @ (source.read(i).ravel() - 127.5)).max(1).argmax() for i in range(40)]
    # The first image has at least half of the weight; with two equal halves either may be the nearest.
    assert np.mean(labels[nearest] == source.labels) > 0.9


def test_the_command_writes_a_prepared_file_and_the_same_again(tmp_path, capsys):
    names = [f"{i}.png" for i in range(12)]
    write_zip(tmp_path / "x.zip", {n: encoded(pixels(8, 8, 3)) for n in names} | labels_json([[n, 5] for n in names]))
    for out in ("a", "b"):
        generate_images.main([str(tmp_path / "x.zip"), str(tmp_path / f"{out}.npy"), "--images", "50", "--size", "16"])
    assert "50 images of 16x16x3" in capsys.readouterr().out
    a, b = (read_prepared(tmp_path / f"{name}.npy") for name in "ab")
    assert torch.equal(a.images, b.images)
    assert a.images.shape == (50, 3, 16, 16)
    assert a.labels.tolist() == [5] * 50


@pytest.mark.parametrize(("option", "value"), [("images", 0), ("size", 0), ("classes", 31)])
def test_options_out_of_range_are_one_line(tmp_path, capsys, option, value):
    write_zip(tmp_path / "x.zip", {f"{i}.png": encoded(pixels(8, 8, 3)) for i in range(30)})
    options = {"images": 40, "size": 8, "classes": 2} | {option: value}
    arguments = [part for name, number in options.items() for part in (f"--{name}", str(number))]
    with pytest.raises(SystemExit, match="2"):
        generate_images.main([str(tmp_path / "x.zip"), str(tmp_path / "out"), *arguments])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: --{option}")
    assert str(value) in error
