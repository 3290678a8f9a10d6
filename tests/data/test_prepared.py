import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.common.errors import InputError
from lit_knn.data import CIFAR10, ImageFiles, Prepared
from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import Options
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from lit_knn.data.reading import reference_from
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from main import main
from tests.image_files import encoded, image_folder, pixels, refusal, write_cifar10, write_folder, write_zip
from tests.interrupted_runs import file_size_limit


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_prepared_file_holds_what_image_files_reads(tmp_path, block):
    source, path = image_folder(tmp_path / "source"), tmp_path / "x.npy"
    prepare(source, path, workers=3, block_images=block)
    images, labels, _ = read_image_files(source)
    found = read_prepared(path)
    np.testing.assert_array_equal(found.images.numpy(), images)
    np.testing.assert_array_equal(found.labels, labels)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x.json", "x.npy"]
    # Every tool reads the pixels.
    mapped = np.load(path, mmap_mode="r")
    assert (mapped.dtype, mapped.shape, mapped.flags.c_contiguous) == (np.uint8, (20, 3, 6, 5), True)
    np.testing.assert_array_equal(read_array_file(path)[0], images)
    description = json.loads(path.with_suffix(".json").read_text())
    assert description["sha256"] == hashlib.sha256(images.tobytes()).hexdigest()
    assert description["shape"] == list(images.shape)
    assert description["labels"] == [i // 5 for i in range(20)]


def test_the_data_module_is_that_of_the_image_files(tmp_path):
    source = image_folder(tmp_path / "source")
    prepare(source, tmp_path / "x.npy")
    options = {"batch_size": 4, "hflip": True, "index": TorchIndex()}
    modules = [ImageFiles(str(source), **options), Prepared(str(tmp_path / "x.npy"), **options)]
    for module in modules:
        module.setup("fit")
    files, mapped = (module.reference for module in modules)
    assert files.fingerprint() == mapped.fingerprint()
    for (x, x_labels), (y, y_labels) in zip(modules[0].train_dataloader(), modules[1].train_dataloader(), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x_labels, y_labels)
    z = torch.randn(3, *files.shape)
    for a, b in zip(files.search(z, 5), mapped.search(z, 5), strict=True):
        assert torch.equal(a, b)
    assert [module.stored().shape for module in modules] == [tuple(files.images.shape)] * 2


def test_a_reference_set_is_read_from_a_path_of_any_kind(tmp_path):
    folder = image_folder(tmp_path / "folder")
    images, labels, _ = read_image_files(folder)
    write_zip(tmp_path / "a.zip", {path.name: path.read_bytes() for path in folder.iterdir()})
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.save(tmp_path / "a.npy", images)
    prepare(folder, tmp_path / "prepared.npy")
    index, whole = TorchIndex(), ReferenceSet(images, hflip=True, labels=labels)
    for name in ("folder", "a.zip", "a.npz", "a.npy", "prepared.npy"):
        reference = reference_from(str(tmp_path / name), index, hflip=True)
        assert reference.fingerprint() == whole.fingerprint()
        assert reference.index is index
        assert reference.labels is None if name == "a.npy" else torch.equal(reference.labels, whole.labels)


def test_center_crop_takes_the_middle_and_resizing_keeps_the_mean(tmp_path):
    # A wide image has other colours outside its middle square; only that square may have an effect.
    array = np.zeros((40, 80, 3), np.uint8)
    array[:, 20:60] = 90
    smooth = np.broadcast_to(np.linspace(0, 240, 64, dtype=np.uint8)[None, :, None], (64, 64, 3))
    source = write_folder(tmp_path / "s", {"0.png": encoded(array), "1.png": encoded(np.ascontiguousarray(smooth))})
    prepare(source, tmp_path / "x.npy", Options(size=8, center_crop=True))
    images = read_prepared(tmp_path / "x.npy").images
    assert (images[0] == 90).all()
    # Each pixel is about the mean of the 8x8 pixels under it; Lanczos rings a little at the border.
    means = torch.tensor(smooth[:, :, 0].astype(float)).view(8, 8, 8, 8).mean((1, 3))
    assert (images[1, 0].double() - means)[:, 1:-1].abs().max() <= 2


def test_rgb_makes_gray_cmyk_and_transparent_images_alike(tmp_path):
    gray = pixels(4, 4)
    source = write_folder(tmp_path / "s", {"0.png": encoded(gray)})
    Image.fromarray(pixels(4, 4, 3)).convert("CMYK").save(source / "1.jpg")
    Image.new("RGBA", (4, 4), (1, 2, 3, 4)).save(source / "2.png")
    assert "1.jpg has mode CMYK" in refusal(prepare, source, tmp_path / "x.npy")
    prepare(source, tmp_path / "x.npy", Options(rgb=True))
    images = read_prepared(tmp_path / "x.npy").images
    np.testing.assert_array_equal(images[0], np.stack([gray] * 3))
    assert images[2, :, 0, 0].tolist() == [1, 2, 3]


def test_cifar10_is_read_with_its_labels(tmp_path, monkeypatch):
    images = write_cifar10(tmp_path, monkeypatch)
    prepare(tmp_path, tmp_path / "x.npy")
    found = read_prepared(tmp_path / "x.npy")
    np.testing.assert_array_equal(found.images.numpy(), images)
    np.testing.assert_array_equal(found.labels, CIFAR10(root=str(tmp_path), download=False).load()[1])


# Interruption


def test_a_changed_source_starts_again_and_a_finished_file_is_kept(tmp_path, capsys):
    source, path = image_folder(tmp_path / "source", number=30), tmp_path / "x.npy"
    (source / "0025.png").write_bytes(b"damaged")
    assert "0025.png is not an image" in refusal(prepare, source, path, block_images=10, workers=1)
    assert "is not finished" in refusal(read_prepared, path)
    assert json.loads((tmp_path / "x.npy.partial.json").read_text())["done"] == 20
    # The repaired source is a different source, so preparing starts again.
    (source / "0025.png").write_bytes(encoded(pixels(6, 5, 3)))
    description = prepare(source, path, block_images=10)
    assert "starting again" in capsys.readouterr().err
    np.testing.assert_array_equal(read_prepared(path).images.numpy(), read_image_files(source)[0])
    before = path.stat().st_mtime_ns
    assert prepare(source, path) == description
    assert path.stat().st_mtime_ns == before
    assert "is there already" in refusal(prepare, image_folder(tmp_path / "other"), path)


def test_a_preparation_that_a_full_disk_ends_goes_on_and_gives_the_same_file(tmp_path, capsys):
    source, out = image_folder(tmp_path / "source", number=100, size=(16, 16)), tmp_path / "x.npy"
    prepare(source, tmp_path / "whole.npy", block_images=5)
    with file_size_limit(50_000), pytest.raises(InputError, match="make room and give the same command again"):
        prepare(source, out, block_images=5)
    assert not out.exists()
    capsys.readouterr()
    prepare(source, out, block_images=5)
    assert "going on after 60 images" in capsys.readouterr().err
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert out.with_suffix(".json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    main(["prepare", "--verify", str(out)])
    assert not list(tmp_path.glob("*.partial*"))


@pytest.fixture
def whole(tmp_path):
    prepare(image_folder(tmp_path / "source"), tmp_path / "whole.npy")
    return tmp_path / "whole.npy"


def test_a_preparation_killed_before_its_last_step_is_finished(whole, monkeypatch):
    content, partial = whole.read_bytes(), whole.with_name("whole.npy.partial")
    described = json.loads(whole.with_suffix(".json").read_text())
    whole.rename(partial)
    whole.with_suffix(".json").unlink()
    partial.with_name("whole.npy.partial.json").write_text(json.dumps({"origin": described["origin"], "done": 20}))
    assert "is not finished" in refusal(read_prepared, whole)
    replaced, seen = os.replace, []

    def watched(source, target):
        if Path(target) == whole:
            seen.append(json.loads(whole.with_suffix(".json").read_text()))
        replaced(source, target)

    monkeypatch.setattr(os, "replace", watched)
    prepare(whole.with_name("source"), whole)
    assert whole.read_bytes() == content
    assert not list(whole.parent.glob("*partial*"))
    assert seen == [described], "the file has its name only when its description is whole"


# Messages for bad input


def test_files_that_are_not_whole_prepared_files_are_refused(whole):
    content, path, good = whole.read_bytes(), whole.with_name("bad.npy"), np.load(whole)
    path.with_suffix(".json").write_bytes(whole.with_suffix(".json").read_bytes())
    for damaged in (content[:-1], content[:100], b""):
        path.write_bytes(damaged)
        assert f"{path} cannot be read" in refusal(read_prepared, path)
    for other in (good[1:], good.astype(np.int8), good[:, 0, 0, 0], np.asfortranarray(good)):
        np.save(path, other)
        assert "is not what bad.json says" in refusal(read_prepared, path)
    assert "is no file" in refusal(read_prepared, whole.with_name("absent.npy"))
    with pytest.raises(InputError, match=r"data\.path=.*bad"):
        Prepared(str(path)).setup()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "whole.json cannot be read: No such file"),
        ({}, "whole.json cannot be read"),
        ({"shape": 5}, "whole.json cannot be read"),
        ({"shape": [20, 3, 6, 4]}, "whole.npy is not what whole.json says"),
        ({"labels": [1, 2]}, "not one label for each image"),
        ({"labels": [0.5] * 20}, "not one label for each image"),
        ({"labels": [0] * 19 + [-1]}, "not one label for each image, an integer from 0"),
    ],
)
def test_a_json_that_does_not_fit_is_refused(whole, change, words):
    beside = whole.with_suffix(".json")
    fields = json.loads(beside.read_text())
    beside.unlink()
    if change is not None:
        beside.write_text(json.dumps(fields | change) if change else "{}")
    assert words in refusal(read_prepared, whole)
    # `prepare` does not overwrite the file, because it might be something else; it gives the same advice.
    assert words in refusal(prepare, whole.with_name("source"), whole)


def test_the_command(tmp_path, capsys):
    source, out = image_folder(tmp_path / "source", size=(6, 8)), str(tmp_path / "x.npy")
    main(["prepare", str(source), out, "--size", "4", "--center-crop", "--workers", "1"])
    assert "20 images of 4x4x3, with labels" in capsys.readouterr().out
    refused = {
        "a\x1b[2J\nb.zip": ([], "a\\x1b[2J\\nb.zip does not exist"),
        str(source): (["--workers", "0"], "--workers must be at least 1, got 0"),
    }
    for path, (more, message) in refused.items():
        with pytest.raises(SystemExit) as caught:
            main(["prepare", path, str(tmp_path / "y.npy"), *more])
        assert caught.value.code == 2
        assert capsys.readouterr().err == f"error: {message}\n"
