"""Prepared files: they hold what the images hold, go on after an interruption, and are refused when they do not fit."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.common.errors import InputError
from lit_knn.data import Arrays, ImageFiles, Prepared
from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import open_source
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare, write_prepared
from lit_knn.data.reading import reference_from
from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from main import main
from tests import ROOT
from tests.image_files import (
    encoded,
    image_folder,
    labels_json,
    pixels,
    refusal,
    write_folder,
    write_zip,
)
from tests.interrupted_runs import file_size_limit


@pytest.fixture
def whole(tmp_path):
    """The file of 20 images of 6x5x3 in four classes, in the folder `source` beside it."""
    prepare(image_folder(tmp_path / "source"), tmp_path / "whole.npy", workers=3, block_images=7)
    return tmp_path / "whole.npy"


def test_images_are_prepared_without_the_seconds_that_torch_takes(tmp_path):
    image_folder(tmp_path / "source", 3, (4, 4))
    code = (
        "import sys; from main import main; "
        f"main(['prepare', {str(tmp_path / 'source')!r}, {str(tmp_path / 'out.npy')!r}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_prepared_file_holds_what_image_files_reads(whole):
    images, labels, _ = read_image_files(whole.with_name("source"))
    found = read_prepared(whole)
    np.testing.assert_array_equal(found.images.numpy(), images)
    np.testing.assert_array_equal(found.labels, labels)
    assert sorted(path.name for path in whole.parent.iterdir()) == [
        "source",
        "whole.json",
        "whole.npy",
    ]
    # Every tool reads the pixels.
    mapped = np.load(whole, mmap_mode="r")
    assert (mapped.dtype, mapped.shape, mapped.flags.c_contiguous) == (
        np.uint8,
        (20, 3, 6, 5),
        True,
    )
    np.testing.assert_array_equal(read_array_file(whole)[0], images)
    description = json.loads(whole.with_suffix(".json").read_text())
    assert description["sha256"] == hashlib.sha256(images.tobytes()).hexdigest()
    assert description["labels"] == [i // 5 for i in range(20)]


def test_images_of_a_path_of_any_kind_are_the_same_set(whole):
    folder = whole.with_name("source")
    images, labels, _ = read_image_files(folder)
    write_zip(whole.with_name("a.zip"), {path.name: path.read_bytes() for path in folder.iterdir()})
    np.savez(whole.with_name("a.npz"), images=images, labels=labels)
    np.save(whole.with_name("a.npy"), images)
    index, expected = TorchIndex(), ReferenceSet(images, hflip=True, labels=labels)
    kinds = {
        "source": ImageFiles,
        "a.zip": ImageFiles,
        "a.npz": Arrays,
        "a.npy": Arrays,
        "whole.npy": Prepared,
    }
    for name, kind in kinds.items():
        path = str(whole.with_name(name))
        data = kind(path, index=index, hflip=True)
        data.setup()
        assert name == "a.npz" or data.stored().shape == (20, 3, 6, 5)
        for reference in (data.reference, reference_from(path, index, hflip=True)):
            assert reference.fingerprint() == expected.fingerprint()
            assert reference.index is index
            assert (
                reference.labels is None
                if name == "a.npy"
                else torch.equal(reference.labels, expected.labels)
            )


def test_center_crop_takes_middle_and_resizing_keeps_mean(tmp_path):
    # A wide image has other colours outside its middle square; only that square may have an effect. So has a tall one.
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 20:60] = 90
    tall = wide.transpose(1, 0, 2)
    smooth = np.tile(np.linspace(0, 240, 64, dtype=np.uint8), (64, 1))
    # Each pixel is about the mean of the 8x8 pixels under it; Lanczos rings a little at the border.
    means = torch.tensor(smooth.astype(float)).view(8, 8, 8, 8).mean((1, 3))
    for i, gradient in enumerate((smooth, np.stack([smooth] * 3, -1))):
        source = write_folder(tmp_path / str(i), {"1.png": encoded(gradient)})
        prepare(source, tmp_path / f"{i}.npy", PrepareOptions(size=8))
        images = read_prepared(tmp_path / f"{i}.npy").images
        assert (images[0].double() - means)[:, :, 1:-1].abs().max() <= 2
    write_folder(source, {"0.png": encoded(wide), "1.png": encoded(tall)})
    assert "0.png is 80x40, which --size 8 would squeeze" in refusal(
        prepare, source, tmp_path / "x.npy", PrepareOptions(8)
    )
    prepare(source, tmp_path / "x.npy", PrepareOptions(size=8, center_crop=True))
    assert (read_prepared(tmp_path / "x.npy").images == 90).all()


def test_a_file_on_another_background_is_not_the_same(tmp_path):
    source, out = tmp_path / "s", tmp_path / "x.npy"
    source.mkdir()
    Image.new("RGBA", (4, 4)).save(source / "0.png")
    prepare(source, out, PrepareOptions(rgb=True, background="black"))
    assert "was made of other images or in another way" in refusal(
        prepare, source, out, PrepareOptions(rgb=True)
    )
    assert (read_prepared(out).images == 0).all()


def test_rgb_makes_gray_cmyk_and_transparent_images_alike(tmp_path):
    gray = pixels(4, 4)
    source = write_folder(tmp_path / "s", {"0.png": encoded(gray)})
    Image.fromarray(pixels(4, 4, 3)).convert("CMYK").save(source / "1.jpg")
    Image.new("RGBA", (4, 4), (1, 2, 3, 4)).save(source / "2.png")
    assert "1.jpg has mode CMYK" in refusal(prepare, source, tmp_path / "x.npy")
    prepare(source, tmp_path / "x.npy", PrepareOptions(rgb=True))
    images = read_prepared(tmp_path / "x.npy").images
    np.testing.assert_array_equal(images[0], np.stack([gray] * 3))


# Interruption


def test_changed_source_starts_again_and_finished_file_stays(tmp_path, capsys):
    source, path = image_folder(tmp_path / "source", number=30), tmp_path / "x.npy"
    (source / "0025.png").write_bytes(b"damaged")
    assert "0025.png is not an image" in refusal(prepare, source, path, block_images=10, workers=1)
    assert "is not finished" in refusal(read_prepared, path)
    (source / "0001.png").write_bytes(encoded(pixels(6, 5, 3)))
    (source / "0025.png").write_bytes(encoded(pixels(6, 5, 3)))
    description = prepare(source, path, block_images=10)
    assert "starting again" in capsys.readouterr().err
    np.testing.assert_array_equal(read_prepared(path).images.numpy(), read_image_files(source)[0])
    before = path.stat().st_mtime_ns
    assert prepare(source, path) == description
    assert path.stat().st_mtime_ns == before


def test_preparation_after_full_disk_goes_on_to_the_same_file(tmp_path, capsys):
    source, out = image_folder(tmp_path / "source", number=100, size=(16, 16)), tmp_path / "x.npy"
    prepare(source, tmp_path / "whole.npy", block_images=5)
    with (
        file_size_limit(50_000),
        pytest.raises(InputError, match="make room and give the same command again"),
    ):
        prepare(source, out, block_images=5)
    assert not out.exists()
    # The record of a partial file that somebody has deleted.
    shutil.copy(tmp_path / "x.npy.partial.json", tmp_path / "y.npy.partial.json")
    for path, told in ((out, "going on after 60 images"), (tmp_path / "y.npy", "starting again")):
        capsys.readouterr()
        prepare(source, path, block_images=5)
        assert told in capsys.readouterr().err
        assert path.read_bytes() == (tmp_path / "whole.npy").read_bytes()
        assert path.with_suffix(".json").read_bytes() == (tmp_path / "whole.json").read_bytes()
        verify(path)
    assert not list(tmp_path.glob("*.partial*"))


def test_a_file_has_its_name_only_when_its_description_is_whole(whole, monkeypatch):
    replaced, out = os.replace, whole.with_name("x.npy")

    def killed(source, target):
        if Path(target) == out:
            raise KeyboardInterrupt
        replaced(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(whole.with_name("source"), out)
    monkeypatch.undo()
    assert out.with_suffix(".json").read_bytes() == whole.with_suffix(".json").read_bytes()
    assert "is not finished" in refusal(read_prepared, out)
    prepare(whole.with_name("source"), out)
    assert out.read_bytes() == whole.read_bytes()
    assert not list(whole.parent.glob("*partial*"))


# Other images


@pytest.mark.parametrize("name", ["0001.png", "0000a.png", "dataset.json"])
def test_a_source_that_changes_meanwhile_is_told(tmp_path, name):
    folder = image_folder(tmp_path / "s", number=6)
    with open_source(folder, PrepareOptions()) as source:

        def read(i):
            if i == 5:  # The last image is read when the others are written.
                labels = labels_json([[f"{i:04d}.png", 5] for i in range(6)])
                write_folder(
                    folder, labels if name == "dataset.json" else {name: encoded(pixels(6, 5, 3))}
                )
            return source.read(i)

        message = refusal(write_prepared, source._replace(read=read), tmp_path / "x.npy", 1, 2)
    assert "was changed meanwhile" in message
    assert not (tmp_path / "x.npy").exists()


def test_a_file_of_other_images_labels_or_options_is_not_taken(tmp_path):
    # Square colour images in one folder: each option leaves the shape as it is.
    pictures = {f"{folder}/0.png": encoded(pixels(4, 4, 3)) for folder in "abc"}
    same = pictures | labels_json([[name, i] for i, name in enumerate(pictures)])
    folder, out = write_folder(tmp_path / "folder", same), tmp_path / "x.npy"
    prepare(write_zip(tmp_path / "first.zip", same), out)
    prepare(write_zip(tmp_path / "same.zip", same), out)
    labels = same | labels_json([[name, 0] for name in pictures])
    for name, other in (("label", labels), ("image", same | {"c/0.png": encoded(pixels(4, 4, 3))})):
        assert "made of other images" in refusal(
            prepare, write_zip(tmp_path / f"{name}.zip", other), out
        )
    options = [
        PrepareOptions(),
        PrepareOptions(size=4),
        PrepareOptions(size=4, center_crop=True),
        PrepareOptions(center_crop=True),
    ]
    options += [PrepareOptions(rgb=True), PrepareOptions(labels_from_folders=True)]
    for i, (first, second) in enumerate(zip(options, options[1:] + options[:1], strict=True)):
        prepare(folder, tmp_path / f"{i}.npy", first)
        assert "made of other images" in refusal(prepare, folder, tmp_path / f"{i}.npy", second)
    # In a folder, an image is known by its size and its time of change.
    changed = folder / "c/0.png"
    for end, time in ((b"", 10**9), (b"end", 0)):
        changed.write_bytes(pictures["c/0.png"])
        os.utime(changed, ns=(0, 0))
        prepare(folder, tmp_path / f"y{time}.npy")
        changed.write_bytes(pictures["c/0.png"] + end)
        os.utime(changed, ns=(0, time))
        assert "made of other images" in refusal(prepare, folder, tmp_path / f"y{time}.npy")


# Messages for bad input


def test_files_that_are_not_whole_prepared_files_are_refused(whole, capsys):
    content, path, good = whole.read_bytes(), whole.with_name("bad.npy"), np.load(whole)
    path.with_suffix(".json").write_bytes(whole.with_suffix(".json").read_bytes())
    for damaged in (content[:-1], content[:100], b""):
        path.write_bytes(damaged)
        assert f"{path} cannot be read" in refusal(read_prepared, path)
    for other in (good[1:], good.astype(np.int8), good[:, 0, 0, 0], np.asfortranarray(good)):
        np.save(path, other)
        assert "is not what bad.json says" in refusal(read_prepared, path)
    with pytest.raises(InputError, match=r"data\.path=.*absent"):
        Prepared(str(whole.with_name("absent.npy"))).setup()
    for place in (128, 500, -1):  # The first pixel, one in the middle, and the last
        flipped = bytearray(content)
        flipped[place] ^= 4
        whole.write_bytes(flipped)
        assert f"{whole} is damaged: its pixels are not what was prepared" in refusal(verify, whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "whole.json cannot be read: No such file"),
        ({"shape": [20, 3, 6, 4]}, "whole.npy is not what whole.json says"),
    ],
)
def test_a_json_that_does_not_fit_is_refused(whole, change, words):
    beside = whole.with_suffix(".json")
    fields = json.loads(beside.read_text())
    beside.unlink()
    if change is not None:
        beside.write_text(json.dumps(fields | change))
    assert words in refusal(read_prepared, whole)
    # `prepare` does not overwrite the file, because it might be something else; it gives the same advice.
    assert words in refusal(prepare, whole.with_name("source"), whole)


def test_labels_that_are_left_out_are_told_after_the_work(whole, capsys):
    folder = whole.with_name("source")
    write_folder(folder, labels_json([["0000.png", 0], ["0001.png", 1]]))
    main(["prepare", str(folder), str(whole.with_name("x.npy"))])
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].endswith(
        f"x.npy has no labels: {folder}: dataset.json has 2 labels for 20 images; it lacks 0002.png"
    )
    assert "20 images of 5x6x3, without labels" in printed.out


def test_the_command(whole, capsys):
    source, out = str(whole.with_name("source")), str(whole.with_name("x.npy"))
    main(["prepare", source, out, "--size", "4", "--center-crop", "--workers", "1"])
    assert "20 images of 4x4x3, with labels" in capsys.readouterr().out
    main(["prepare", "--verify", out])
    assert "20 images are what was prepared" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "a\x1b[2J\nb.zip", str(whole.with_name("y.npy"))])
    assert capsys.readouterr().err == "error: a\\x1b[2J\\nb.zip does not exist\n"
