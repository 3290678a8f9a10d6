"""Prepared files that are damaged, cut or of other data: found by hashes, lengths and descriptions."""

import json
import os

import numpy as np
import pytest

from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import Options, open_source
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare, write_prepared
from main import main
from tests.image_files import encoded, image_folder, labels_json, pixels, refusal, write_folder, write_zip


def test_a_flipped_bit_is_found_by_verify(tmp_path, capsys):
    path = tmp_path / "x.npy"
    prepare(image_folder(tmp_path / "s"), path)
    main(["prepare", "--verify", str(path)])
    assert "20 images are what was prepared" in capsys.readouterr().out
    content = path.read_bytes()
    for place in (128, 500, -1):  # The first pixel, one in the middle, and the last
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        message = refusal(verify, path)
        assert f"{path} is damaged: its pixels are not what was prepared" in message
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "--verify", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


# Files that change while they are used


@pytest.mark.parametrize("change", ["content", "added", "labels", "zip"])
def test_a_source_that_changes_meanwhile_is_told(tmp_path, change):
    folder = image_folder(tmp_path / "s", number=6)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = write_zip(tmp_path / "s.zip", files) if change == "zip" else folder
    other = encoded(pixels(6, 5, 3))
    changed = {
        "content": {"0001.png": other},
        "added": {"0000a.png": other},
        "labels": labels_json([[f"{i:04d}.png", 5] for i in range(6)]),
        "zip": {"0002.png": other},
    }[change]

    with open_source(path, Options()) as source:

        def read(i):
            # The last image is read when the others are written.
            if i == 5 and change == "zip":
                write_zip(tmp_path / "new.zip", files | changed)
                os.replace(tmp_path / "new.zip", path)
            elif i == 5:
                write_folder(folder, changed)
            return source.read(i)

        message = refusal(write_prepared, source._replace(read=read), tmp_path / "x.npy", 1, 2)
    assert "was changed while it was prepared" in message
    assert not (tmp_path / "x.npy").exists()
    # The same command makes the file of what is there now.
    if change != "added":  # An image has no label then.
        prepare(path, tmp_path / "x.npy")
        np.testing.assert_array_equal(read_prepared(tmp_path / "x.npy").images, read_image_files(path)[0])


@pytest.mark.parametrize("done", [20, -3])
def test_a_cut_partial_is_not_resumed_for_ever(tmp_path, done, capsys):
    source = image_folder(tmp_path / "s")
    origin = prepare(source, tmp_path / "x.npy").origin
    whole = (tmp_path / "x.npy").read_bytes()
    # Four images and a half are there; the record says otherwise.
    (tmp_path / "y.npy.partial").write_bytes(whole[: 128 + 9 * 45])
    (tmp_path / "y.npy.partial.json").write_text(json.dumps({"origin": origin, "done": done}))
    prepare(source, tmp_path / "y.npy")
    assert (tmp_path / "y.npy").read_bytes() == whole
    assert "starting again" in capsys.readouterr().err
    verify(tmp_path / "y.npy")


def test_a_file_of_other_options_is_not_taken(tmp_path):
    # Square colour images in one folder: each option leaves the shape as it is.
    files = {f"{folder}/0.png": encoded(pixels(4, 4, 3)) for folder in "abc"}
    source = write_folder(tmp_path / "s", files | labels_json([[name, 0] for name in files]))
    options = [Options(), Options(size=4), Options(size=4, center_crop=True), Options(center_crop=True)]
    options += [Options(rgb=True), Options(labels_from_folders=True)]
    for first, second in zip(options, options[1:] + options[:1], strict=True):
        out = tmp_path / f"{options.index(first)}.npy"
        prepare(source, out, first)
        assert "is there already" in refusal(prepare, source, out, second)
