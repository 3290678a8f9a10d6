"""Fidelity metrics against torch-fidelity, their cache, and their messages for bad input."""

import pickle

import numpy as np
import pytest
import torch
import torch_fidelity
from torch.utils.data import Dataset
from torch_fidelity import metric_fid

from lit_knn.common.errors import InputError
from lit_knn.metrics import DINOv2, EfficientNetLite0, InceptionV3, Pixels
from lit_knn.metrics.fidelity import (
    FeatureSums,
    frechet_distance_of_statistics,
    inception_score,
    kernel_distance,
    precision_recall,
)
from lit_knn.metrics.fidelity_measure import load_statistics, save_statistics
from tests.inception import blobs


class Pictures(Dataset):
    def __init__(self, pixels):
        self.pixels = pixels

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        return self.pixels[i]


def model_space(pixels):
    return pixels / 127.5 - 1


def statistics(extractor, images):
    extractor.load(tuple(images.shape[1:]), "cpu")
    sums = FeatureSums(extractor.num_features, extractor.num_logits, keep_features=True)
    for numbers in torch.arange(len(images)).split(7):
        sums.update(numbers, *extractor(images[numbers]))
    return sums.compute()


def within_the_span(one, two, verbose, theirs=metric_fid.fid_statistics_to_metric):
    """torch-fidelity's distance, in the few directions in which few images differ.

    Neither covariance nor difference of means has a part outside of them, so the distance is the same. The eigenvalues
    of all 2048 directions take most of a minute.
    """
    random = np.random.default_rng(0).standard_normal((len(one["mu"]), 16))
    spanning = [one["sigma"] @ random, two["sigma"] @ random, (one["mu"] - two["mu"])[:, None]]
    basis = np.linalg.qr(np.hstack(spanning))[0]
    small = [{"mu": basis.T @ part["mu"], "sigma": basis.T @ part["sigma"] @ basis} for part in (one, two)]
    for part, whole in zip(small, (one, two), strict=True):
        assert np.trace(part["sigma"]) == pytest.approx(np.trace(whole["sigma"]), rel=1e-9)
    return theirs(*small, verbose)


def test_numbers_are_those_of_torch_fidelity_on_the_same_images_and_weights(random_weights, monkeypatch):
    monkeypatch.setattr(metric_fid, "fid_statistics_to_metric", within_the_span)
    generated, real = blobs(11, seed=0), (blobs(7, seed=1) // 2) + 60
    theirs = torch_fidelity.calculate_metrics(
        input1=Pictures(generated),
        input2=Pictures(real),
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=random_weights,
        **dict.fromkeys(("fid", "isc", "kid", "prc", "save_cpu_ram"), True),
        **dict.fromkeys(("cuda", "verbose", "cache"), False),
        kid_subset_size=6,
    )
    extractor = InceptionV3(random_weights)
    ours, of_data = statistics(extractor, model_space(generated)), statistics(extractor, model_space(real))
    fid = frechet_distance_of_statistics(ours, of_data)
    assert fid > 5
    assert fid == pytest.approx(theirs["frechet_inception_distance"], abs=1e-3, rel=0)
    score = inception_score(ours.logits)
    assert score["inception_score"] > 1.01
    assert score["inception_score"] == pytest.approx(theirs["inception_score_mean"], abs=1e-3)
    assert score["inception_score_std"] == pytest.approx(theirs["inception_score_std"], abs=1e-3)
    kid = kernel_distance(ours.features, of_data.features, subset_size=6)
    assert kid["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-3)
    shares = precision_recall(ours.features, of_data.features)
    assert shares == {name: pytest.approx(theirs[name]) for name in ("precision", "recall")}
    assert not extractor.is_published


def test_precision_is_of_the_generated_and_recall_of_the_real_images():
    real = torch.randn(60, 2)
    near = real[:4].repeat(10, 1) + 1e-3 * torch.randn(40, 2)  # realistic, but all of a few kinds
    found = precision_recall(near, real)
    assert found["precision"] == 1
    assert found["recall"] < 0.5


def test_distance_of_gaussians_with_known_answer():
    # Commuting covariances: ‖m − m'‖² + Σ (σ − σ')². A small deviation of both sets counts, too.
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    a, b = torch.tensor([1.0, 2, 3, 0.01, 0]).double(), torch.tensor([2.0, 2, 1, 0.02, 1]).double()
    points = torch.randn(400, 5, dtype=torch.float64)
    points -= points.mean(0)
    white = points @ torch.linalg.inv(torch.linalg.cholesky(points.T @ points / 399)).T
    one, two = FeatureSums(5), FeatureSums(5)
    for sums, sigma, shift in ((one, a, 0.0), (two, b, 2.0)):
        sums.update(torch.arange(400), (white * sigma) @ basis.T + shift)
    expected = 5 * 2.0**2 + float((a - b).square().sum())
    assert frechet_distance_of_statistics(one.compute(), two.compute()) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance_of_statistics(one.compute(), one.compute()) == pytest.approx(0, abs=1e-7)


def test_statistics_add_up_in_any_order_and_over_ranks_as_in_float64():
    # Features far from zero lose their covariance in float32.
    features, logits = 1000 + torch.randn(50, 6), torch.randn(50, 4)
    parts = [FeatureSums(6, 4, keep_features=True) for _ in range(2)]
    for rank, part in enumerate(parts):
        for numbers in torch.arange(50).split(8)[rank::2]:
            part.update(numbers, features[numbers], logits[numbers])
    # `dist_reduce_fx` adds or joins the states of two ranks.
    for name in ("feature_sum", "outer_sum", "count", "numbers", "features", "logits"):
        setattr(parts[0], name, getattr(parts[0], name) + getattr(parts[1], name))
    found = parts[0].compute()
    assert torch.equal(found.features, features)
    assert torch.equal(found.logits, logits)
    torch.testing.assert_close(found.mean, features.double().mean(0))
    np.testing.assert_allclose(found.cov, np.cov(features.double().numpy(), rowvar=False), atol=1e-6)
    assert found.count == 50


def test_efficientnet_knows_a_flower_from_noise():
    # With wrong scaling or weights the network's distances would mean nothing.
    from sklearn.datasets import load_sample_image

    extractor = EfficientNetLite0()
    picture = torch.from_numpy(load_sample_image("flower.jpg")[:420, 100:520].copy()).permute(2, 0, 1)[None]
    extractor.load(tuple(picture.shape[1:]), "cpu")
    features, _ = extractor(model_space(picture))
    probabilities = extractor.network._fc(features).softmax(1)
    assert int(probabilities.argmax()) == 985  # class 985 of ImageNet is a flower, the daisy
    assert float(probabilities.max()) > 0.2


# The cache


def test_cached_statistics_come_back_and_damaged_ones_do_not(tmp_path):
    kept = statistics(Pixels(), torch.rand(30, 3))
    path = tmp_path / "new" / "file.npz"
    assert load_statistics(path) is None
    save_statistics(path, kept)
    read = load_statistics(path)
    for name in ("mean", "cov", "features"):
        assert torch.equal(getattr(read, name), getattr(kept, name))
    assert read.count == 30
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:200] + b"\xff" * 9 + content[209:]):
        path.write_bytes(damaged)
        assert load_statistics(path) is None


# Bad input


def test_missing_weights_are_named_with_what_to_put_where(monkeypatch, tmp_path):
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", "http://127.0.0.1:9/weights-inception-6726825d.pth")
    with pytest.raises(InputError) as error:
        InceptionV3().load((3, 32, 32), "cpu")
    assert "http://127.0.0.1:9/weights-inception-6726825d.pth could not be downloaded" in str(error.value)
    assert str(tmp_path / "hub" / "checkpoints" / "weights-inception-6726825d.pth") in str(error.value)
    with pytest.raises(InputError, match=r"weights=nowhere\.pth: no such file"):
        InceptionV3("nowhere.pth")


def test_weights_that_hold_more_than_tensors_are_not_run(tmp_path):
    torch.save(InceptionV3(), tmp_path / "wrong.pth")
    with pytest.raises(pickle.UnpicklingError):
        InceptionV3(tmp_path / "wrong.pth").load((3, 32, 32), "cpu")


@pytest.mark.parametrize(("extractor", "shape"), [(InceptionV3, (64,)), (EfficientNetLite0, (4, 8, 8)), (DINOv2, (4,))])
def test_networks_look_at_pictures_only(extractor, shape):
    with pytest.raises(InputError, match=rf"{extractor.__name__}: needs images of 1 or 3 channels.*use Pixels"):
        extractor().load(shape, "cpu")
