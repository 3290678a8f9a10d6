"""`score` against torch-fidelity, prdc and pytorch-fid on the same files, and the spread of other draws."""

import tarfile
import warnings
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import torch_fidelity
from PIL import Image
from prdc import compute_prdc
from pytorch_fid import fid_score
from torch_fidelity.feature_extractor_base import FeatureExtractorBase

from lit_knn.common.errors import InputError
from lit_knn.common.pixels import to_uint8
from lit_knn.data.image_stream import stream_of_path, stream_of_set
from lit_knn.metrics import FidelityMeasure, Pixels, ScoreOptions, score
from lit_knn.metrics.feature_statistics import FeatureStatistics
from lit_knn.metrics.half_splits import half_split_errors
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.scorer import Scorer
from lit_knn.reference import ReferenceSet
from tests.image_files import encoded, refusal, write_folder, write_zip
from tests.inception import blobs


class WithLogits(Pixels):
    """Pixels, the first eight of them as logits, too."""

    num_logits = 8

    def __call__(self, images):
        features, _ = super().__call__(images)
        return features, 3 * features[:, :8]


class ForTorchFidelity(FeatureExtractorBase):
    """The same features for torch-fidelity, which reads the files itself."""

    def __init__(self, name, features_list, **_):
        super().__init__(name, features_list)

    def forward(self, pixels):
        features = (pixels.float() / 127.5 - 1).flatten(1)
        layers = {"all": features, "some": 3 * features[:, :8]}
        # The order of the layers is that of a set of strings, which differs between processes.
        return tuple(layers[name] for name in self.features_list)

    @staticmethod
    def get_provided_features_list():
        return ("all", "some")

    @staticmethod
    def get_default_feature_layer_for_metric(metric):
        return "some" if metric == "isc" else "all"

    @staticmethod
    def can_be_compiled():
        return False


torch_fidelity.register_feature_extractor("flat", ForTorchFidelity)
FLAT = ScoreOptions(features=WithLogits(), kid_subset_size=40, splits=0)
PLAIN = ScoreOptions(features="pixels", splits=0)


def pictures(number, seed):
    """Smooth colourful pictures of 4x4 pixels, (number, 3, 4, 4), uint8."""
    return blobs(number, seed)[:, :, ::8, ::8]


def written(folder, images):
    """Write pictures, (N, 3, H, W), as PNG files."""
    files = {}
    for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        files[f"{number:04d}.png"] = encoded(image)
    return write_folder(folder, files)


def by_metric(rows):
    """Values by metric, of one set of samples and one reference."""
    return {row["metric"]: row["value"] for row in rows}


def test_values_equal_torch_fidelity_on_the_same_folders(tmp_path):
    generated = written(tmp_path / "generated", pictures(120, 0))
    real = written(tmp_path / "real", pictures(90, 1) // 2 + 60)
    expected = torch_fidelity.calculate_metrics(
        input1=str(generated),
        input2=str(real),
        feature_extractor="flat",
        **dict.fromkeys(("fid", "isc", "kid", "prc", "save_cpu_ram"), True),
        **dict.fromkeys(("cuda", "verbose", "cache"), False),
        kid_subset_size=40,
    )
    measured = by_metric(score(generated, real, "fd,is,kid,pr", options=FLAT))
    names = {
        "fd_pixels": "frechet_inception_distance",
        "inception_score": "inception_score_mean",
        "kid": "kernel_inception_distance_mean",
        "precision": "precision",
        "recall": "recall",
    }
    assert measured.keys() == names.keys()
    for name, other in names.items():
        assert measured[name] == pytest.approx(expected[other], rel=1e-4), name
    assert measured["precision"] != measured["recall"]
    assert measured["fd_pixels"] > 1
    # The callback measures by the same code.
    measure = FidelityMeasure(WithLogits(), extra_metrics=["kid", "recall"], kid_subset_size=40)
    data = ReferenceSet(pictures(90, 1) // 2 + 60)
    of_callback = measure(data, ReferenceSet(pictures(120, 0)).share(0, 1, 64), None)
    for name in ("fd_pixels", "inception_score", "kid", "recall"):
        assert of_callback[name] == pytest.approx(measured[name], rel=1e-6)


@pytest.mark.parametrize("k", [2, 5])
def test_shares_equal_prdc_for_each_number_of_neighbours(k):
    generated, real = pictures(150, 2), pictures(130, 3)
    options = ScoreOptions(features="pixels", pr_k=k, dc_k=k, splits=0)
    measured = by_metric(score(generated, real, "pr,dc", options=options))
    flat = [(part.flatten(1).double() / 127.5 - 1).numpy() for part in (real, generated)]
    expected = compute_prdc(*flat, nearest_k=k)
    assert measured == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
    assert 0.1 < measured["recall"] < 1


class ForPytorchFid(torch.nn.Module):
    """Pixels as pytorch-fid's networks return them, which get values from 0 to 1."""

    def forward(self, x):
        return [(2 * x - 1).flatten(1)[:, :, None, None]]


@pytest.mark.filterwarnings("ignore:.*`disp` argument:DeprecationWarning")
def test_distance_to_a_statistics_file_equals_pytorch_fid(tmp_path, capsys):
    statistics = []
    for number, seed in enumerate((4, 5)):
        files = sorted(written(tmp_path / str(number), pictures(80, seed)).iterdir())
        arguments = files, ForPytorchFid(), 20, 48, "cpu", 0
        statistics.append(fid_score.calculate_activation_statistics(*arguments))

    # What `save_fid_stats` writes, and guidance's further arrays
    mean, cov = statistics[1]
    path = tmp_path / "stats.npz"
    np.savez_compressed(path, mu=mean, sigma=cov, mu_s=np.zeros(7), sigma_s=np.eye(7))
    (row,) = score(tmp_path / "0", path, "fd_pixels", options=PLAIN)
    expected = fid_score.calculate_frechet_distance(*statistics[0], *statistics[1])
    assert row["value"] == pytest.approx(expected, rel=1e-4)
    assert (row["reference"], row["reference_images"]) == (str(path), "")
    assert "48 features; not used: mu_s, sigma_s" in capsys.readouterr().err
    # With images, too, there is a row for each.
    rows = score(tmp_path / "0", [path, tmp_path / "1"], "fd_pixels", options=PLAIN)
    values = {row["reference"]: row["value"] for row in rows}
    assert values.keys() == {str(path), str(tmp_path / "1")}
    assert values[str(path)] == pytest.approx(values[str(tmp_path / "1")], rel=1e-4)


def test_statistics_of_an_address_are_downloaded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.chdir(tmp_path)
    np.savez("stats.npz", mu=np.zeros(48), sigma=np.eye(48))
    expected = by_metric(score(pictures(60, 0), "stats.npz", "fd_pixels", options=PLAIN))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/stats.npz"
        first = score(pictures(60, 0), address, "fd_pixels", options=PLAIN)
        server.shutdown()
    again = score(pictures(60, 0), address, "fd_pixels", options=PLAIN)
    assert by_metric(first) == by_metric(again) == expected
    assert again[0]["reference"] == address


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_every_kind_of_file_has_the_same_score(tmp_path):
    images, real = pictures(24, 6), pictures(40, 7)
    folder = written(tmp_path / "folder", images)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    np.savez(tmp_path / "adm.npz", arr_0=images.permute(0, 2, 3, 1).numpy(), arr_1=np.arange(24))
    np.save(tmp_path / "plain.npy", images.numpy())
    np.save(tmp_path / "floats.npy", (images / 127.5 - 1).numpy())
    write_zip(tmp_path / "images.zip", files)
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(folder, "images")
    names = "adm.npz", "plain.npy", "images.zip", "images.tar"
    paths = [folder, *(tmp_path / name for name in names)]
    rows = score([*paths, tmp_path / "floats.npy"], real, "fd_pixels,pr", options=PLAIN)
    by_samples = {}
    for row in rows:
        by_samples.setdefault(row["samples"], []).append((row["metric"], row["value"]))
    assert len(by_samples) == 6
    first = by_samples[str(folder)]
    for values in by_samples.values():
        assert values == [(name, pytest.approx(value, rel=1e-5)) for name, value in first]
    pixels = {row["samples"]: row["pixels"] for row in rows}
    assert pixels[str(folder)] == "bytes as stored"
    assert pixels[str(tmp_path / "floats.npy")] == "floats, not rounded"
    # Arrays and sets of images in memory have names in the table.
    named = score({"mine": images, "set": ReferenceSet(images)}, real, "fd_pixels", options=PLAIN)
    assert [row["samples"] for row in named] == ["mine", "set"]


def test_bytes_are_those_of_edm_and_not_of_guided_diffusion():
    x = 1.2 * (2 * torch.rand(100_000, generator=torch.Generator().manual_seed(0)) - 1)
    edm = (x * 127.5 + 128).clip(0, 255).to(torch.uint8)
    guided_diffusion = ((x + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    assert float((to_uint8(x) == edm).double().mean()) > 0.999
    assert float((to_uint8(x) == guided_diffusion).double().mean()) < 0.7


def test_half_splits_give_the_spread_of_other_draws():
    generator = torch.Generator().manual_seed(0)

    def drawn(number):
        return torch.randn(number, 1, 1, 3, generator=generator)

    real, options = drawn(300), ScoreOptions(features="pixels", splits=6)
    values, errors = {}, {}
    for _ in range(25):
        for row in score(1.3 * drawn(200), real, "fd_pixels,pr,dc", options=options):
            values.setdefault(row["metric"], []).append(row["value"])
            errors.setdefault(row["metric"], []).append(row["standard_error"])
    for name, drawn_values in values.items():
        # 25 draws tell their spread to 14 %. Halves have other balls, so those of recall differ a bit more.
        assert np.mean(errors[name]) == pytest.approx(np.std(drawn_values), rel=0.35), name


def test_half_split_error_of_a_mean_is_the_textbook_one():
    features = torch.randn(400, 2, dtype=torch.float64)
    samples = FeatureStatistics(features.mean(0), features.T.cov(), 400, features)
    errors = half_split_errors(lambda half: {"mean": float(half.mean[0])}, samples, 300)
    assert errors["mean"] == pytest.approx(float(features[:, 0].std()) / 20, rel=0.15)


def test_copies_are_told_by_every_test_for_copies():
    training, new = pictures(200, 8), pictures(260, 9)
    options = ScoreOptions(features="pixels", splits=0)
    samples = {"copies": training[:60] ^ 1, "new": new[:60]}
    rows = score(samples, training, "memorisation", held_out=new[60:], options=options)
    copies, others = (
        by_metric([row for row in rows if row["samples"] == name]) for name in samples
    )
    assert copies["copied_fraction"] == 1
    assert others["copied_fraction"] < 0.2
    assert copies["auth_pct"] == 0
    assert others["auth_pct"] > 30
    assert copies["c_t"] < -5 < abs(others["c_t"]) - 5 < -2


def test_offline_features_answer_without_weights_and_say_so(monkeypatch, tmp_path):
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", "http://127.0.0.1:9/weights-6726825d.pth")
    images = pictures(14, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = score(images[:7], images[7:], "fid,is,pr", options=ScoreOptions(splits=0))
    assert [row["metric"] for row in rows] == ["fd_efficientnet_lite0", "precision", "recall"]
    assert {row["features"] for row in rows} == {"EfficientNetLite0"}
    texts = " ".join(str(warning.message) for warning in caught)
    assert "put that file at" in texts
    assert "Instead of it: fd_efficientnet_lite0, which is comparable with no published" in texts
    assert "is: left out" in texts
    # Weights that the user names are not replaced.
    with pytest.raises((InputError, OSError), match=r"gone\.pth"):
        score(images, images, "fid", options=ScoreOptions(inception_weights="gone.pth"))


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": "fdi"}, "there is no metric 'fdi'; there are fid, fd_dinov2"),
        ({"samples": pictures(9, 0)[..., :2]}, "has images of 2x4 with 3 channels, but reference"),
        ({"samples": pictures(9, 0)[:, :1]}, "make them alike first.* --size 4 --rgb"),
        ({"metrics": "kid"}, "kid_subset_size=1000: at least 1000 images are needed, there are 9"),
        ({"reference": "stats.npz", "metrics": "kid,pr"}, "kid, pr: compare with single images"),
        ({"reference": "stats.npz"}, "has statistics of 5 features, but here are fd_pixels 48"),
        ({"reference": "stats.pkl"}, "is a pickle, which may run any code"),
        ({"reference": "https://127.0.0.1:9/a/s.npz"}, "could not be downloaded .* put that file"),
        ({"samples": []}, "there are no samples"),
        ({"samples": pictures(1, 0)}, "fd_pixels: at least 2 images are needed, there are 1"),
        ({"reference": pictures(9, 1)[:, :1]}, "another program must make the samples grey"),
        (
            {"samples": torch.zeros(9, 4, 4, 4)},
            "with 4 channels, but .*: give samples of the same kind",
        ),
        ({"held_out": pictures(9, 1)[..., :2]}, "held_out has images of 2x4"),
        ({"samples": pictures(9, 0) / 255}, "samples 1: float images with values from 0"),
        ({"samples": pictures(9, 0).float() - 128}, "samples 1: float images with values from -1"),
        ({"reference": pictures(9, 1).float()}, "reference: float images with .* never rescaled"),
        ({"held_out": pictures(9, 1).double()}, "held_out: float images with values"),
        ({"reference": "skew.npz"}, "sigma is no covariance, because it is not symmetric"),
        ({"reference": "negative.npz"}, "sigma is no covariance, .* negative eigenvalue -1"),
        (
            {"metrics": "memorisation", "held_out": pictures(19, 1), "samples": pictures(30, 0)},
            "c_t: at least 20 samples and held-out images are needed, there are 30 and 19",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    np.savez("stats.npz", mu=np.zeros(5), sigma=np.eye(5))
    skew = np.eye(48)
    skew[0, 1] = 1.0
    np.savez("skew.npz", mu=np.zeros(48), sigma=skew)
    np.savez("negative.npz", mu=np.zeros(48), sigma=np.diag([-1.0, *[2.0] * 47]))
    Path("stats.pkl").touch()
    defaults = {"samples": pictures(9, 0), "reference": pictures(9, 1), "metrics": "fd_pixels"}
    defaults["options"] = ScoreOptions(features="pixels")
    with pytest.raises(InputError, match=message) as error:
        score(**{**defaults, **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
@pytest.mark.filterwarnings("ignore:c_t")
def test_copies_alone_need_no_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", None)
    rows = score(pictures(8, 0), pictures(20, 1), "memorisation", options=ScoreOptions(splits=0))
    assert {row["features"] for row in rows} == {"Pixels"}


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_bad_files_among_samples_are_named(tmp_path):
    folder = written(tmp_path / "folder", pictures(5, 0))
    Image.new("RGB", (9, 9)).save(folder / "0003.png")
    message = refusal(score, folder, pictures(9, 1), "fd_pixels")
    assert "0000.png is 4x4 with 3 channels and 0003.png is 9x9" in message
    (folder / "0003.png").write_bytes(b"no image")
    assert "0003.png is not an image" in refusal(score, folder, pictures(9, 1), "fd_pixels")


def test_a_last_file_of_another_size_is_refused_before_any_features(tmp_path, monkeypatch):
    monkeypatch.setattr(Pixels, "__call__", None)
    folder = written(tmp_path / "folder", pictures(5, 0))
    for other in (
        Image.new("RGB", (4, 5)),
        Image.new("L", (4, 4)),
        Image.new("RGBA", (4, 4), (0, 0, 0, 9)),
    ):
        other.save(folder / "z.png")
        assert "z.png" in refusal(score, folder, pictures(9, 1), "fd_pixels")
    # A palette is no other shape.
    Image.new("P", (4, 4)).save(folder / "z.png")
    assert stream_of_path(folder).count == 6


def test_a_photo_that_lies_on_its_side_in_its_file_has_its_upright_size(tmp_path):
    tags = Image.Exif()
    tags[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (8, 4)).save(tmp_path / "a.jpg")
    Image.new("RGB", (4, 8)).save(tmp_path / "b.jpg", exif=tags)
    assert stream_of_path(tmp_path).shape == (3, 4, 8)
    Image.new("RGB", (8, 4)).save(tmp_path / "b.jpg", exif=tags)
    assert "b.jpg is 4x8 with 3 channels" in refusal(stream_of_path, tmp_path)


def test_float_pictures_that_are_meant_are_measured():
    images = pictures(9, 0)
    shares = images.double() / 255
    options = ScoreOptions(features="pixels", splits=0, floats_as_is=True)
    rows = score(shares, images, "fd_pixels", options=options)
    # Pixels of twice the width, half of it higher, are the same pictures in model space.
    (same,) = score(2 * shares - 1, images, "fd_pixels", options=options)
    assert rows[0]["value"] > 1 > 1e-6 > abs(same["value"])


def test_device_that_is_not_there_is_refused_before_any_work():
    with pytest.raises(InputError, match="'foo' is no device, such as cpu"):
        ScoreOptions(device="foo")
    with pytest.raises(InputError, match=r"cuda:63 is given, but PyTorch can use \d GPUs of this"):
        ScoreOptions(device="cuda:63")


def test_a_threshold_of_no_copy_is_refused_before_any_work():
    for threshold in (0.0, 2.0, float("nan")):
        rule = "threshold must be above 0 and at most 1"
        assert rule in refusal(ScoreOptions, copy_threshold=threshold)


def test_auth_pct_has_the_error_of_a_share_in_per_cent():
    rows = score(pictures(60, 9), pictures(200, 8), "memorisation", options=PLAIN)
    (row,) = (row for row in rows if row["metric"] == "auth_pct")
    share = row["value"] / 100
    assert 0 < share < 1
    assert row["standard_error"] == pytest.approx(100 * (share * (1 - share) / 59) ** 0.5, rel=1e-3)


def test_likest_pairs_have_their_own_images():
    training = pictures(50, 8)
    samples = training[:9].clone()
    samples[:, :, 0, 0] ^= 1
    scorer = Scorer(
        ScoreData("real", ReferenceSet(training)), ["memorisation"], PLAIN, samples.shape[1:]
    )
    scorer.rows(stream_of_set(ReferenceSet(samples), "copies"))
    pairs, images = scorer.pairs
    assert len(pairs) == 9
    assert (pairs - images).abs().max() < 0.01
