"""The images that benchmarks and trials at scale generate, from a few small ones."""

import numpy as np
import pytest
import torch

from benchmarks import generate_images
from lit_knn.data.prepared import read_prepared
from tests.image_files import encoded, labels_json, pixels, write_zip

NAMES = [f"{i}.png" for i in range(30)]


@pytest.fixture
def source(tmp_path):
    """Thirty noisy images of 12x12 in three classes."""
    images = {name: pixels(12, 12, 3) for name in NAMES}
    labels = labels_json([[name, i % 3] for i, name in enumerate(NAMES)])
    write_zip(tmp_path / "x.zip", {name: encoded(image) for name, image in images.items()} | labels)
    return str(tmp_path / "x.zip"), np.stack([*images.values()]).transpose(0, 3, 1, 2)


def shifted_and_mirrored(images):
    """Each image, mirrored or not, at each shift: (N, 2·9·9, C·H·W)."""
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    cuts = [padded[:, :, i : i + 12, j : j + 12] for i in range(9) for j in range(9)]
    return np.stack([*cuts, *(cut[..., ::-1] for cut in cuts)], 1).reshape(len(images), -1, images[0].size)


def test_a_generated_image_is_near_a_shifted_source_image_of_its_label_and_the_same_again(source, tmp_path, capsys):
    path, images = source
    for out, size in (("a", "12"), ("b", "12"), ("large", "16")):
        generate_images.main([path, str(tmp_path / f"{out}.npy"), "--images", "40", "--size", size])
    assert "40 images of 16x16x3" in capsys.readouterr().out
    a, b, large = (read_prepared(tmp_path / f"{name}.npy") for name in ("a", "b", "large"))
    assert torch.equal(a.images, b.images)
    assert large.images.shape == (40, 3, 16, 16)
    candidates = shifted_and_mirrored(images).astype(np.float32)
    candidates -= candidates.mean(2, keepdims=True)
    candidates /= np.linalg.norm(candidates, axis=2, keepdims=True)
    nearest = [(candidates @ (np.asarray(image, np.float32).ravel() - 127.5)).max(1).argmax() for image in a.images]
    # The first image has at least half of the weight; with two equal halves either may be the nearest.
    assert np.mean(np.array(nearest) % 3 == np.asarray(a.labels)) > 0.9


def test_an_option_out_of_range_is_one_line(source, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        generate_images.main([source[0], str(tmp_path / "out"), "--images", "40", "--classes", "31"])
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: --classes 31")
