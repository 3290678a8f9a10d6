import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.commands.prepare import main
from lit_knn.common.errors import InputError
from lit_knn.data import ImageFiles, Prepared
from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import Options
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from lit_knn.data.reading import reference_from
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from tests.image_files import encoded, image_folder, pixels, refusal, write_folder, write_zip
from tests.interrupted_runs import file_size_limit


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_prepared_file_holds_what_image_files_reads(tmp_path, block):
    source = image_folder(tmp_path / "source")
    prepare(source, tmp_path / "x.npy", workers=3, block_images=block)
    images, labels = read_image_files(source)
    found = read_prepared(tmp_path / "x.npy")
    np.testing.assert_array_equal(found.images.numpy(), images)
    np.testing.assert_array_equal(found.labels, labels)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "x.json", "x.npy"]


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
    images, labels = read_image_files(folder)
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
    os.truncate(tmp_path / "prepared.npy", 1000)
    assert "was cut" in refusal(reference.gather, torch.tensor([0]))


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


def test_labels_from_folders_are_their_places_by_name(tmp_path):
    names = ["n02/b.jpeg", "n01/c.JPEG", "n10/a.png", "n01/d.png"]
    source = write_folder(tmp_path / "s", {name: encoded(pixels(4, 4, 3)) for name in names})
    prepare(source, tmp_path / "x.npy", Options(labels_from_folders=True))
    # The images are in the order of names: n01/c, n01/d, n02/b, n10/a.
    assert read_prepared(tmp_path / "x.npy").labels.tolist() == [0, 0, 1, 2]
    assert ImageFiles(str(source), labels_from_folders=True).load()[1].tolist() == [0, 0, 1, 2]


def test_rgb_makes_gray_cmyk_and_transparent_images_alike(tmp_path):
    gray = pixels(4, 4)
    cmyk = Image.fromarray(pixels(4, 4, 3)).convert("CMYK")
    (tmp_path / "s").mkdir()
    Image.fromarray(gray).save(tmp_path / "s" / "0.png")
    cmyk.save(tmp_path / "s" / "1.jpg")
    Image.new("RGBA", (4, 4), (1, 2, 3, 4)).save(tmp_path / "s" / "2.png")
    assert "1.jpg has mode CMYK" in refusal(prepare, tmp_path / "s", tmp_path / "x.npy")
    prepare(tmp_path / "s", tmp_path / "x.npy", Options(rgb=True))
    images = read_prepared(tmp_path / "x.npy").images
    np.testing.assert_array_equal(images[0], np.stack([gray] * 3))
    assert images[2, :, 0, 0].tolist() == [1, 2, 3]


def test_cifar10_is_read_as_torchvision_keeps_it(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    data, targets = pixels(30, 32, 32, 3), list(range(10)) * 3

    def init(self, root, train, download):
        assert train
        assert not download
        self.data, self.targets = data, targets

    monkeypatch.setattr(CIFAR10, "__init__", init)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    prepare(tmp_path / "data", tmp_path / "x.npy")
    found = read_prepared(tmp_path / "x.npy")
    np.testing.assert_array_equal(found.images.numpy(), data.transpose(0, 3, 1, 2))
    assert found.labels.tolist() == targets


# Interruption


def test_what_was_done_is_not_done_again(tmp_path, monkeypatch, capsys):
    source = image_folder(tmp_path / "source", number=30)
    (source / "0025.png").write_bytes(b"damaged")
    assert "0025.png is not an image" in refusal(prepare, source, tmp_path / "x.npy", block_images=10, workers=1)
    assert "is not finished" in refusal(read_prepared, tmp_path / "x.npy")
    assert json.loads((tmp_path / "x.npy.partial.json").read_text())["done"] == 20
    # The repaired source is a different source, so preparing starts again.
    (source / "0025.png").write_bytes(encoded(pixels(6, 5, 3)))
    prepare(source, tmp_path / "x.npy", block_images=10)
    assert "starting again" in capsys.readouterr().err
    np.testing.assert_array_equal(read_prepared(tmp_path / "x.npy").images.numpy(), read_image_files(source)[0])


# Messages for bad input


def test_a_finished_file_is_kept(tmp_path):
    source = image_folder(tmp_path / "source")
    description = prepare(source, tmp_path / "x.npy")
    before = (tmp_path / "x.npy").stat().st_mtime_ns
    assert prepare(source, tmp_path / "x.npy") == description
    assert (tmp_path / "x.npy").stat().st_mtime_ns == before
    assert "is there already" in refusal(prepare, source, tmp_path / "x.npy", Options(size=4, center_crop=True))
    assert "is there already" in refusal(prepare, image_folder(tmp_path / "other"), tmp_path / "x.npy")


@pytest.fixture
def whole(tmp_path):
    prepare(image_folder(tmp_path / "source"), tmp_path / "whole.npy")
    return tmp_path / "whole.npy"


def test_every_tool_reads_the_pixels(whole):
    pixels = np.load(whole, mmap_mode="r")
    assert (pixels.dtype, pixels.shape, pixels.flags.c_contiguous) == (np.uint8, (20, 3, 6, 5), True)
    np.testing.assert_array_equal(pixels, read_array_file(whole)[0])
    description = json.loads(whole.with_suffix(".json").read_text())
    assert description["sha256"] == hashlib.sha256(pixels.tobytes()).hexdigest()
    assert description["shape"] == list(pixels.shape)
    assert description["labels"] == [i // 5 for i in range(20)]


def test_files_that_are_not_whole_prepared_files_are_refused(whole):
    content, path = whole.read_bytes(), whole.with_name("bad.npy")
    path.with_suffix(".json").write_bytes(whole.with_suffix(".json").read_bytes())

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        message = refusal(read_prepared, path)
        assert str(path) in message
        return message

    for damaged in (content[:-1], content[:100], b"", b"\0" * len(content)):
        assert "bad.npy cannot be read" in refused(damaged)
    for other in (np.zeros((19, 3, 6, 5), np.uint8), np.zeros((20, 3, 6, 5), np.int8), np.zeros(20, np.uint8)):
        np.save(path, other)
        assert "is not what bad.json says" in refusal(read_prepared, path)
    np.save(path, np.asfortranarray(np.load(whole)))
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
        ({"labels": 3}, "not one label for each image"),
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


def test_a_preparation_killed_before_its_last_step_is_finished(whole):
    content, partial = whole.read_bytes(), whole.with_name("whole.npy.partial")
    origin = json.loads(whole.with_suffix(".json").read_text())["origin"]
    whole.rename(partial)
    partial.with_name("whole.npy.partial.json").write_text(json.dumps({"origin": origin, "done": 20}))
    assert "is not finished" in refusal(read_prepared, whole)
    prepare(whole.with_name("source"), whole)
    assert whole.read_bytes() == content
    assert not list(whole.parent.glob("*partial*"))


def test_the_command(tmp_path, capsys):
    source = image_folder(tmp_path / "source", size=(6, 8))
    main([str(source), str(tmp_path / "x.npy"), "--size", "4", "--center-crop", "--workers", "1"])
    assert "20 images of 4x4x3, with labels" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "absent"), str(tmp_path / "y.npy")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'} does not exist\n"
    with pytest.raises(SystemExit):
        main(["a\x1b[2J\nb.zip", str(tmp_path / "y.npy")])
    assert capsys.readouterr().err == "error: a\\x1b[2J\\nb.zip does not exist\n"


# Memory


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
    main(["--verify", str(out)])
    assert not list(tmp_path.glob("*.partial*"))


def test_a_prepared_file_has_its_name_only_when_its_description_is_whole(tmp_path, monkeypatch):
    out, replaced, seen = tmp_path / "x.npy", os.replace, []

    def watched(source, target):
        if Path(target) == out:
            seen.append(json.loads(out.with_suffix(".json").read_text())["sha256"])
        replaced(source, target)

    monkeypatch.setattr(os, "replace", watched)
    prepare(image_folder(tmp_path / "source"), out)
    assert seen == [json.loads(out.with_suffix(".json").read_text())["sha256"]]
