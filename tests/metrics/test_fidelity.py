"""Distances between sets of images against torch-fidelity and closed forms, and their options."""

import pickle

import numpy as np
import pytest
import torch
import torch_fidelity
from PIL import Image
from torch.utils.data import Subset
from torch_fidelity import metric_fid

from lit_knn.common.errors import InputError
from lit_knn.metrics import DINOv2, EfficientNetLite0, FidelityMeasure, InceptionV3, Pixels
from lit_knn.metrics.feature_statistics import FeatureStatistics, FeatureSums, feature_statistics
from lit_knn.metrics.fidelity import (
    frechet_distance,
    frechet_distance_of_statistics,
    inception_score,
    kernel_distance,
)
from lit_knn.metrics.sample_quality import precision_recall
from lit_knn.reference import ReferenceSet
from lit_knn.reference.row_view import RowView
from tests.inception import blobs


def model_space(pixels):
    return pixels / 127.5 - 1


def summed(features, logits=None):
    sums = FeatureSums(
        features.shape[1], 0 if logits is None else logits.shape[1], keep_features=True
    )
    sums.update(torch.arange(len(features)), features, logits)
    return sums.compute()


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_numbers_equal_torch_fidelity_on_images_and_weights(random_weights):
    generated, real = blobs(11, seed=0), (blobs(7, seed=1) // 2) + 60
    theirs = torch_fidelity.calculate_metrics(
        input1=Subset(generated, range(11)),
        input2=Subset(real, range(7)),
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=random_weights,
        **dict.fromkeys(("isc", "kid", "prc", "save_cpu_ram"), True),
        **dict.fromkeys(("cuda", "verbose", "cache"), False),
        kid_subset_size=6,
    )
    extractor = InceptionV3(random_weights)
    extractor.load((3, 32, 32), "cpu")
    ours, of_data = (
        summed(*extractor(model_space(generated))),
        summed(*extractor(model_space(real))),
    )
    # torch-fidelity takes most of a minute for the eigenvalues of all 2048 features.
    few = [part.features[:, :64] for part in (ours, of_data)]
    fid = metric_fid.fid_statistics_to_metric(
        *map(metric_fid.fid_features_to_statistics, few), verbose=False
    )
    fid = fid["frechet_inception_distance"]
    assert fid > 0.1
    assert frechet_distance_of_statistics(*map(summed, few)) == pytest.approx(fid, rel=1e-4)
    score = inception_score(ours.logits)
    assert score["inception_score"] > 1.01
    assert score["inception_score"] == pytest.approx(theirs["inception_score_mean"], abs=1e-3)
    assert score["inception_score_std"] == pytest.approx(theirs["inception_score_std"], abs=1e-3)
    kid = kernel_distance(ours.features, of_data.features, subset_size=6)
    assert kid["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-3)
    shares = precision_recall(ours.features, of_data.features)
    assert shares == {name: pytest.approx(theirs[name]) for name in ("precision", "recall")}
    assert shares["precision"] != shares["recall"]
    with pytest.warns(
        UserWarning, match="are not the published ones, so neither are FID and Inception Score"
    ):
        FidelityMeasure(extractor).prepare(
            ReferenceSet(torch.zeros(20, 3, 32, 32, dtype=torch.uint8)), 20
        )


def test_distance_of_gaussians_with_known_answer():
    # Commuting covariances: ‖m − m'‖² + Σ (σ − σ')². A small deviation of both sets counts, too.
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    a, b = torch.tensor([1.0, 2, 3, 0.01, 0]).double(), torch.tensor([2.0, 2, 1, 0.02, 1]).double()
    points = torch.randn(400, 5, dtype=torch.float64)
    points -= points.mean(0)
    white = points @ torch.linalg.inv(torch.linalg.cholesky(points.T @ points / 399)).T
    one, two = summed((white * a) @ basis.T), summed((white * b) @ basis.T + 2.0)
    expected = 5 * 2.0**2 + float((a - b).square().sum())
    assert frechet_distance_of_statistics(one, two) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance_of_statistics(one, one) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0])
def test_distance_of_four_images_with_mostly_zero_features(spread):
    """LAPACK's fast method does not converge for one in ten such covariances."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.rand(1280, generator=generator) * (torch.rand(1280, generator=generator) > 0.9)
    for _ in range(10):
        a, b = (shared * (1 + spread * torch.randn(4, 1280, generator=generator)) for _ in range(2))
        a, b = a.float().double(), b.float().double()
        # With C = A'A for the centred features A of few images, Tr(C C')^½ is the nuclear norm of A B'.
        centred = [(x - x.mean(0)) / 3**0.5 for x in (a, b)]
        cross = torch.linalg.matrix_norm(centred[0] @ centred[1].T, "nuc")
        squares = sum(x.square().sum() for x in centred)
        expected = (a.mean(0) - b.mean(0)).square().sum() + squares - 2 * cross
        statistics = [FeatureStatistics(x.mean(0), torch.cov(x.T), 4) for x in (a, b)]
        assert frechet_distance_of_statistics(*statistics) == pytest.approx(
            expected.item(), abs=1e-6 * squares.item()
        )


def test_statistics_add_in_any_order_and_over_ranks():
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
    np.testing.assert_allclose(
        found.cov, np.cov(features.double().numpy(), rowvar=False), atol=1e-6
    )
    assert found.count == 50


def test_efficientnet_tells_flower_from_noise_in_any_precision():
    # With wrong scaling or weights the network's distances would mean nothing.
    from sklearn.datasets import load_sample_image

    extractor = EfficientNetLite0()
    picture = torch.from_numpy(load_sample_image("flower.jpg")[:420, 100:520].copy()).permute(
        2, 0, 1
    )[None]
    extractor.load(tuple(picture.shape[1:]), "cpu")
    features, _ = extractor(model_space(picture))
    probabilities = extractor.network._fc(features).softmax(1)
    assert int(probabilities.argmax()) == 985  # class 985 of ImageNet is a flower, the daisy
    assert float(probabilities.max()) > 0.2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = extractor(model_space(picture))
    assert torch.equal(again, features)
    assert not features.requires_grad


def test_nonfinite_pictures_are_refused_and_equal_ones_measured():
    extractor, images = (
        EfficientNetLite0(),
        2 * torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)) - 1,
    )
    # The covariance of equal pictures is rounding errors alone.
    assert frechet_distance(images[:1].expand(64, -1, -1, -1), images, extractor) > 0
    real = feature_statistics([(torch.arange(6), images)], extractor, "cpu")
    images[3, 0, 0, 0] = torch.nan  # It would be a black pixel.
    broken = feature_statistics([(torch.arange(6), images)], extractor, "cpu")
    with pytest.raises(InputError, match="features of the first set, of 6 images, are not finite"):
        frechet_distance_of_statistics(broken, real)


HUB = """
import torch


class Flat(torch.nn.Flatten):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(self.factor * x)


def dinov2_vitl14(pretrained):
    assert not pretrained
    return Flat()
"""


def test_dinov2_preprocessing_is_the_published_one(monkeypatch, tmp_path):
    from sklearn.datasets import load_sample_image
    from torchvision import transforms

    code, weights = tmp_path / "hub" / "facebookresearch_dinov2_main", tmp_path / "weights.pth"
    code.mkdir(parents=True)
    (code / "hubconf.py").write_text(HUB)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.save({"factor": torch.tensor(2.0)}, weights)
    extractor, photo = DINOv2(weights), Image.fromarray(load_sample_image("flower.jpg"))
    noise = np.random.default_rng(0)
    # dgm-eval of Stein et al. 2023, in the terms of PIL and torchvision.
    published = transforms.Compose(
        [
            transforms.Resize((224, 224), transforms.InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    sizes = [(32, 32), (33, 47), (64, 64), (128, 96), (224, 224), (256, 256), (400, 400)]
    for size in sizes:  # Small images are enlarged, and large ones made smaller.
        cut = photo.crop((150, 60, 550, 460)).resize(size[::-1])
        pictures = [cut, Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8))]
        images = torch.stack(
            [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]
        )
        extractor.load(tuple(images.shape[1:]), "cpu")
        features, logits = extractor(model_space(images))
        assert logits is None
        expected = torch.stack([published(picture).flatten() for picture in pictures])
        # One of 255 grey levels is 2 / 255 / 0.229 = 0.034, so every byte is the same.
        torch.testing.assert_close(features, 2 * expected, rtol=0, atol=1e-5)
    torch.save({"factor": torch.tensor(3.0)}, tmp_path / "other.pth")
    assert (
        DINOv2(tmp_path / "other.pth").fingerprint()
        != extractor.fingerprint()
        != DINOv2().fingerprint()
    )
    with pytest.raises(FileNotFoundError, match=r"gone\.pth"):
        DINOv2("gone.pth").load((3, 8, 8), "cpu")


# Options of a measurement


class WithLogits(Pixels):
    """Pixels, and three of them as logits."""

    num_logits = 3

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, features[:, :3]


SCORE = {"inception_score", "inception_score_std"}  # It compares with no image.


@pytest.fixture
def dark():
    return (127 + 40 * torch.randn(40, 1, 2, 2)).clamp(0, 255).to(torch.uint8)


def test_only_the_metrics_that_were_asked_for_are_returned(dark, tmp_path):
    def measured(extractor=Pixels, **options):
        distance, reference = FidelityMeasure(extractor(), 16, **options), ReferenceSet(dark)
        distance.prepare(reference, 30)
        bright = ReferenceSet(255 - dark)
        images = bright.gather(torch.arange(30))
        found = [distance(real, [(torch.arange(30), images)], None) for real in (bright, reference)]
        # A second data set does not count with the statistics of the first.
        assert 2 * found[0][distance.metric] < found[1][distance.metric]
        return found[1]

    plain = measured(cache_dir=str(tmp_path))
    assert plain.keys() == {"fd_pixels"}
    assert measured(extra_metrics=["recall"]).keys() == {"fd_pixels", "recall"}
    assert measured(WithLogits).keys() == {"fd_pixels", *SCORE}
    found = measured(
        WithLogits, extra_metrics=["kid", "precision", "recall"], kid_subset_size=20, held_out=True
    )
    names = {"fd_pixels", "kid", "kid_std", "precision", "recall"}
    assert found.keys() == {f"{name}_held_out" for name in names} | SCORE
    # Statistics kept without features do not serve KID.
    few, many = (
        measured(cache_dir=str(tmp_path), extra_metrics=["kid"], kid_subset_size=size)
        for size in (5, 30)
    )
    assert few.keys() == many.keys() == {"fd_pixels", "kid", "kid_std"}
    assert few["fd_pixels"] == pytest.approx(plain["fd_pixels"])
    assert few["kid_std"] > 1.5 * many["kid_std"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("extractor", "options", "count", "message"),
    [
        # Mirror images are no real images, so that they do not make enough.
        (
            Pixels,
            {"extra_metrics": ["kid"], "kid_subset_size": 60},
            80,
            "kid_subset_size=60: at least 60 images are needed, there are 40",
        ),
        (Pixels, {"extra_metrics": ["recall"]}, 3, "at least 4 images are needed, there are 3"),
        (WithLogits, {}, 9, "inception_score: at least 10 images are needed, there are 9"),
    ],
)
def test_too_few_images_are_refused_before_any_is_looked_at(
    extractor, options, count, message, dark
):
    reference = ReferenceSet(dark, hflip=True)
    with pytest.raises(InputError, match=message):
        FidelityMeasure(extractor(), **options).prepare(reference, count)
    FidelityMeasure(extractor(), mirrored=True, **options).prepare(reference, 80)


def test_images_that_cannot_be_compared_are_refused():
    images = 2 * torch.rand(4, 3, 8, 8) - 1
    with pytest.raises(InputError, match="samples must be at least two images"):
        frechet_distance(images[:1], images, Pixels())
    with pytest.raises(InputError, match=r"samples have shape \(8, 8, 3\), and data \(3, 8, 8\)"):
        frechet_distance(images.movedim(1, 3), images, Pixels())
    # A set is taken as it is; that of some rows of a mapped file is a view.
    view = ReferenceSet(RowView(images.half(), torch.tensor([0, 1, 3])))
    assert frechet_distance(view, view, Pixels()) == pytest.approx(0, abs=1e-6)
    with pytest.warns(UserWarning, match="float images with values from 0.* are never rescaled"):
        frechet_distance(images.abs(), images, Pixels())


def test_pixels_of_large_images_are_refused_before_their_covariance_is_made():
    large = ReferenceSet(torch.zeros(4, 3, 256, 256))
    with pytest.raises(InputError, match="need a covariance of 309 GB"):
        FidelityMeasure(Pixels()).prepare(large, 4)


def test_missing_weights_are_named_and_wrong_ones_not_run(monkeypatch, tmp_path):
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(
        inception, "URL_INCEPTION_V3", "http://127.0.0.1:9/weights-inception-6726825d.pth"
    )
    with pytest.raises(InputError) as error:
        InceptionV3().load((3, 32, 32), "cpu")
    assert "http://127.0.0.1:9/weights-inception-6726825d.pth could not be downloaded" in str(
        error.value
    )
    assert str(tmp_path / "hub" / "checkpoints" / "weights-inception-6726825d.pth") in str(
        error.value
    )
    torch.save(InceptionV3(), tmp_path / "wrong.pth")  # It holds more than tensors.
    with pytest.raises(pickle.UnpicklingError):
        InceptionV3(tmp_path / "wrong.pth").load((3, 32, 32), "cpu")
