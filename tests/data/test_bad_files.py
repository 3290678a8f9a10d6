"""Preparing with bad files: all are named in one pass, what is done is kept, and the result is the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import open_source
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare, write_prepared
from main import main
from tests.image_files import (
    encoded,
    image_folder,
    labels_json,
    pixels,
    refusal,
    write_folder,
    write_zip,
)


def reads_of(source, out, **options):
    """Prepare, and return the numbers of the images that were decoded."""
    numbers = []
    with open_source(source, PrepareOptions()) as images:

        def read(i):
            numbers.append(i)
            return images.read(i)

        write_prepared(images._replace(read=read), out, workers=1, block_images=5, **options)
    return numbers


def assert_same(path, other):
    assert path.read_bytes() == other.read_bytes()
    assert path.with_suffix(".json").read_bytes() == other.with_suffix(".json").read_bytes()
    verify(path)


@pytest.fixture
def source(tmp_path):
    """A folder of 30 images with labels, of which 7, 8 and 22 are bad."""
    folder = image_folder(tmp_path / "source", number=30)
    (folder / "0007.png").write_bytes(b"damaged")
    (folder / "0008.png").write_bytes(b"")
    (folder / "0022.png").write_bytes((folder / "0022.png").read_bytes()[:-30])
    return folder


def test_all_bad_files_are_named_in_one_pass(source, tmp_path):
    told = refusal(prepare, source, tmp_path / "x.npy", block_images=5)
    assert "source: 3 of 30 image files are bad: 0007.png is not an image" in told
    assert "0008.png is empty; 0022.png cannot be read as an image" in told
    assert told.endswith("; remove them, or leave them out with --skip-bad; what is done is kept")
    assert "is not finished" in refusal(read_prepared, tmp_path / "x.npy")
    # The second time no file is read again.
    assert refusal(reads_of, source, tmp_path / "x.npy") == told


def test_what_to_do_fits_the_number_of_bad_files(tmp_path):
    files = {"a.png": b"", "b.png": encoded(pixels(4, 4, 3))}
    told = refusal(prepare, write_folder(tmp_path / "one", files), tmp_path / "x.npy")
    assert (
        told
        == "one: a.png is empty; remove it, or leave it out with --skip-bad; what is done is kept"
    )
    folder = write_folder(tmp_path / "all", {"a.png": b"", "b.png": b""})
    for skip_bad in (False, True):
        told = refusal(prepare, folder, tmp_path / "y.npy", skip_bad=skip_bad)
        assert told.endswith("b.png is empty; no image is left to prepare")


def test_a_file_that_the_system_could_not_read_is_tried_again(tmp_path, monkeypatch):
    folder = image_folder(tmp_path / "source", number=12)
    whole, denied = Path.open, ["0007.png"]

    def limited(path, *args, **options):
        if path.name in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, "open", limited)
    told = refusal(prepare, folder, tmp_path / "x.npy", block_images=5)
    assert "source: 0007.png cannot be read: Permission denied; remove it" in told
    # Permission changes neither size nor date of a file. The first block is kept.
    denied.clear()
    assert reads_of(folder, tmp_path / "x.npy") == list(range(5, 12))
    prepare(folder, tmp_path / "again.npy")
    assert_same(tmp_path / "again.npy", tmp_path / "x.npy")


def test_bad_files_are_left_out_and_named_beside_the_file(source, tmp_path, capsys):
    out = tmp_path / "x.npy"
    refusal(prepare, source, out, block_images=5)
    assert reads_of(source, out, skip_bad=True) == []
    lines = out.with_suffix(".skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["0007.png", "0008.png", "0022.png"]

    good = [i for i in range(30) if i not in (7, 8, 22)]
    found = read_prepared(out)
    assert found.labels.tolist() == [i * 4 // 30 for i in good]
    prepare(source, tmp_path / "again.npy", skip_bad=True)
    assert_same(tmp_path / "again.npy", out)
    # A finished file is found by the same command, and says what it lacks.
    capsys.readouterr()
    main(["prepare", str(source), str(out), "--skip-bad"])
    assert (
        "27 images of 5x6x3, with labels, 0.00 GB; 3 bad files are left out, see x.skipped.txt"
        in capsys.readouterr().out
    )

    for i in (7, 8, 22):
        (source / f"{i:04d}.png").unlink()
    write_folder(source, labels_json([[f"{i:04d}.png", i * 4 // 30] for i in good]))
    np.testing.assert_array_equal(found.images, read_image_files(source)[0])


def test_after_bad_files_are_removed_it_goes_on(source, tmp_path, capsys):
    out = tmp_path / "x.npy"
    refusal(prepare, source, out, block_images=5)
    for i in (7, 8):
        (source / f"{i:04d}.png").unlink()
    capsys.readouterr()
    assert "0022.png cannot be read" in refusal(prepare, source, out, block_images=5)
    (source / "0022.png").unlink()
    (source / "dataset.json").unlink()
    assert reads_of(source, out) == []
    assert "going on after 27 images" in capsys.readouterr().err
    prepare(source, tmp_path / "fresh.npy")
    assert_same(out, tmp_path / "fresh.npy")
    assert not out.with_suffix(".skipped.txt").exists()


def test_after_a_bad_file_is_repaired_only_later_images_are_read(source, tmp_path, capsys):
    out = tmp_path / "x.npy"
    refusal(prepare, source, out, block_images=5)
    (source / "0022.png").write_bytes(encoded(pixels(6, 5, 3)))
    # The first file decides the shape, and is known. Blocks have five files, so three blocks come before.
    assert reads_of(source, out, skip_bad=True) == list(range(20, 30))
    prepare(source, tmp_path / "fresh.npy", skip_bad=True)
    assert_same(out, tmp_path / "fresh.npy")


def test_an_interruption_keeps_what_is_known_to_be_bad(source, tmp_path):
    out, numbers = tmp_path / "x.npy", []
    with open_source(source, PrepareOptions()) as images:

        def read(i):
            numbers.append(i)
            if i == 17:
                raise KeyboardInterrupt
            return images.read(i)

        with pytest.raises(KeyboardInterrupt):
            write_prepared(images._replace(read=read), out, 1, 5, skip_bad=True)
    assert reads_of(source, out, skip_bad=True) == list(range(15, 30))
    prepare(source, tmp_path / "fresh.npy", skip_bad=True)
    assert_same(out, tmp_path / "fresh.npy")


def test_the_first_images_may_be_bad_and_all_may(tmp_path):
    image = encoded(pixels(4, 4, 3))
    source = write_zip(tmp_path / "a.zip", {"a.png": b"", "b.png": b"no", "c.png": image})
    assert prepare(source, tmp_path / "x.npy", skip_bad=True).shape == (1, 3, 4, 4)
    source = write_zip(tmp_path / "b.zip", {"a.png": b"", "b.png": b"no"})
    assert "2 of 2 image files are bad" in refusal(
        prepare, source, tmp_path / "y.npy", skip_bad=True
    )


def test_other_sizes_and_colours_are_not_bad_files(tmp_path):
    image = encoded(pixels(4, 4, 3))
    for name, other, words in (
        ("size", encoded(pixels(5, 4, 3)), "makes them alike with --size and --rgb"),
        ("alpha", encoded(pixels(4, 4, 4)), "with --rgb"),
    ):
        source = write_folder(tmp_path / name, {"a.png": image, "b.png": other})
        assert words in refusal(prepare, source, tmp_path / "x.npy", skip_bad=True)


def test_a_list_of_skipped_files_is_of_the_last_preparation(tmp_path):
    source, out = tmp_path / "s", tmp_path / "x.npy"
    write_folder(source, {"a.png": encoded(pixels(4, 4)), "b.png": b""})
    prepare(source, out, skip_bad=True)
    assert (tmp_path / "x.skipped.txt").read_text().startswith("b.png")
    for path in (source / "b.png", out, tmp_path / "x.json"):
        path.unlink()
    prepare(source, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "x.json", "x.npy"]


def test_class_whose_images_are_all_bad_is_refused(tmp_path):
    files = {
        "cat/0.png": encoded(pixels(4, 4)),
        "cow/0.png": b"",
        "dog/0.png": encoded(pixels(4, 4)),
    }
    options = PrepareOptions(labels_from_folders=True)
    folder = write_folder(tmp_path / "s", files)
    line = refusal(prepare, folder, tmp_path / "x.npy", options, skip_bad=True)
    assert "all images of the class cow are bad" in line
    (folder / "cow" / "0.png").unlink()
    (folder / "cow").rmdir()
    made = prepare(folder, tmp_path / "x.npy", options, skip_bad=True)
    assert (made.labels, made.class_names) == ([0, 1], ["cat", "dog"])


def test_other_options_start_again(source, tmp_path, capsys):
    refusal(prepare, source, tmp_path / "x.npy", block_images=5)
    prepare(source, tmp_path / "x.npy", PrepareOptions(size=4, center_crop=True), skip_bad=True)
    assert "begun with other images or in another way: starting again" in capsys.readouterr().err
    assert json.loads((tmp_path / "x.json").read_text())["shape"] == [27, 3, 4, 4]
