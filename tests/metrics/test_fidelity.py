"""Fidelity metrics against torch-fidelity and torchmetrics, their cache, and their messages for bad input."""

import numpy as np
import pytest
import torch
import torch_fidelity
from torch.utils.data import Dataset
from torch_fidelity import metric_fid
from torchmetrics.image.fid import FrechetInceptionDistance

from lit_knn.common.errors import InputError
from lit_knn.metrics import DINOv2, EfficientNetLite0, InceptionV3, Pixels
from lit_knn.metrics.fidelity import (
    FeatureSums,
    frechet_distance_of_statistics,
    inception_score,
    kernel_distance,
    precision_recall,
)
from lit_knn.metrics.fidelity_measure import cache_path, load_statistics, save_statistics
from lit_knn.reference import ReferenceSet
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


def statistics(extractor, images, batch_size=7, **options):
    extractor.load(tuple(images.shape[1:]), "cpu")
    sums = FeatureSums(extractor.num_features, extractor.num_logits, **options)
    for numbers in torch.arange(len(images)).split(batch_size):
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
    ours = statistics(extractor, model_space(generated), keep_features=True)
    of_data = statistics(extractor, model_space(real), keep_features=True)
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


def test_distance_of_gaussians_with_known_answer():
    # Commuting covariances: ‖m − m'‖² + Σ (σ − σ')².
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    # A small deviation of both sets counts, too.
    a, b = torch.tensor([1.0, 2, 3, 0.01, 0]).double(), torch.tensor([2.0, 2, 1, 0.02, 1]).double()
    one, two = FeatureSums(5), FeatureSums(5)
    points = torch.randn(400, 5, dtype=torch.float64)
    points -= points.mean(0)
    white = points @ torch.linalg.inv(torch.linalg.cholesky(points.T @ points / 399)).T
    for sums, sigma, shift in ((one, a, 0.0), (two, b, 2.0)):
        sums.update(torch.arange(400), (white * sigma) @ basis.T + shift)
    expected = 5 * 2.0**2 + float((a - b).square().sum())
    assert frechet_distance_of_statistics(one.compute(), two.compute()) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance_of_statistics(one.compute(), one.compute()) == pytest.approx(0, abs=1e-7)


def test_pixel_distance_is_that_of_torchmetrics():
    images = [torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    class Flat(torch.nn.Module):
        num_features = 16

        def forward(self, x):
            return x.flatten(1)

    theirs = FrechetInceptionDistance(feature=Flat())
    theirs.update(images[0], real=True)
    theirs.update(images[1] * 0.7, real=False)
    ours = frechet_distance_of_statistics(statistics(Pixels(), images[0]), statistics(Pixels(), images[1] * 0.7))
    assert ours == pytest.approx(float(theirs.compute()), rel=1e-4)


def test_statistics_add_up_in_any_order_and_over_ranks():
    torch.manual_seed(0)
    features, logits = torch.randn(50, 6), torch.randn(50, 4)
    whole = FeatureSums(6, 4, keep_features=True)
    whole.update(torch.arange(50), features, logits)
    parts = [FeatureSums(6, 4, keep_features=True) for _ in range(2)]
    for rank, part in enumerate(parts):
        for numbers in torch.arange(50).split(8)[rank::2]:
            part.update(numbers, features[numbers], logits[numbers])
    # `dist_reduce_fx` adds or joins the states of two ranks.
    for name in ("feature_sum", "outer_sum", "count", "numbers", "features", "logits"):
        setattr(parts[0], name, getattr(parts[0], name) + getattr(parts[1], name))
    one, two = whole.compute(), parts[0].compute()
    assert torch.equal(one.features, features)
    assert torch.equal(two.features, features)
    assert torch.equal(two.logits, logits)
    torch.testing.assert_close(two.cov, torch.from_numpy(np.cov(features.double().numpy(), rowvar=False)))
    torch.testing.assert_close(one.mean, two.mean)
    assert two.count == 50


def test_efficientnet_knows_a_flower_from_noise():
    # With wrong scaling or weights the network's distances would mean nothing.
    from sklearn.datasets import load_sample_image

    extractor = EfficientNetLite0()
    picture = torch.from_numpy(load_sample_image("flower.jpg")[:420, 100:520].copy()).permute(2, 0, 1)[None]
    extractor.load(tuple(picture.shape[1:]), "cpu")
    features, logits = extractor(model_space(picture))
    assert features.shape == (1, 1280)
    assert logits is None
    probabilities = extractor.network._fc(features).softmax(1)
    assert int(probabilities.argmax()) == 985  # class 985 of ImageNet is a flower, the daisy
    assert float(probabilities.max()) > 0.2


# The cache


def test_cached_statistics_come_back_and_damaged_ones_do_not(tmp_path):
    kept = statistics(Pixels(), torch.rand(30, 3), keep_features=True)
    path = tmp_path / "new" / "file.npz"
    save_statistics(path, kept)
    read = load_statistics(path, 3)
    assert torch.equal(read.mean, kept.mean)
    assert torch.equal(read.cov, kept.cov)
    assert torch.equal(read.features, kept.features)
    assert read.count == 30
    assert [p.name for p in path.parent.iterdir()] == ["file.npz"]
    assert load_statistics(path, 4) is None
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no statistics", content[:200] + b"\xff" * 9 + content[209:]):
        path.write_bytes(damaged)
        assert load_statistics(path, 3) is None
    assert load_statistics(tmp_path / "absent.npz", 3) is None


def test_fingerprints_tell_data_and_extractors_apart(tmp_path):
    images = torch.randint(0, 256, (5000, 1, 4, 4), dtype=torch.uint8)
    changed = images.clone()
    changed[4999, 0, 3, 3] += 1
    prints = {
        ReferenceSet(x, hflip=flip).fingerprint() for x in (images, changed, images.float()) for flip in (False, True)
    }
    prints |= {ReferenceSet(images.reshape(5000, 1, 2, 8)).fingerprint()}
    assert len(prints) == 7
    assert ReferenceSet(images).fingerprint() == ReferenceSet(images.clone()).fingerprint()
    paths = {cache_path(tmp_path, "fid", data, net, kept) for data in "ab" for net in "cd" for kept in (True, False)}
    assert len(paths) == 8


# Bad input


def test_missing_weights_are_named_with_what_to_put_where(monkeypatch, tmp_path):
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", "http://127.0.0.1:9/weights-inception-6726825d.pth")
    with pytest.raises(InputError) as error:
        InceptionV3().load((3, 32, 32), "cpu")
    message = str(error.value)
    assert "http://127.0.0.1:9/weights-inception-6726825d.pth could not be downloaded" in message
    assert str(tmp_path / "hub" / "checkpoints" / "weights-inception-6726825d.pth") in message
    assert "`weights`" in message
    with pytest.raises(InputError, match=r"weights=nowhere\.pth: no such file"):
        InceptionV3("nowhere.pth")


def test_wrong_weights_are_refused_in_one_line(tmp_path, random_weights):
    state = torch.load(random_weights, weights_only=True)
    state["fc.weight"] = torch.zeros(1000, 2048)
    contents = {
        "shape": (state, r"fc\.weight.*1000, 2048"),
        "names": ({"conv.weight": torch.zeros(3)}, "Missing key"),
        "kind": ([1, 2], "dict"),
    }
    for name, (content, reason) in contents.items():
        path = tmp_path / f"{name}.pth"
        torch.save(content, path)
        with pytest.raises(InputError, match=rf"InceptionV3: weights=.*{name}\.pth are not those.*{reason}") as error:
            InceptionV3(path).load((3, 32, 32), "cpu")
        assert "\n" not in str(error.value)
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(InputError, match=r"text\.pth are not those"):
        InceptionV3(tmp_path / "text.pth").load((3, 32, 32), "cpu")


@pytest.mark.parametrize("extractor", [InceptionV3, EfficientNetLite0, DINOv2])
@pytest.mark.parametrize("shape", [(4, 8, 8), (64,)])
def test_networks_look_at_pictures_only(extractor, shape):
    with pytest.raises(InputError, match=rf"{extractor.__name__}: needs images of 1 or 3 channels.*use Pixels"):
        extractor().load(shape, "cpu")
