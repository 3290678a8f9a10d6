"""Prepared files that are damaged, cut or of other data: found by hashes, lengths and descriptions."""

import json
import os

import numpy as np
import pytest
import torch

from lit_knn.commands.prepare import main
from lit_knn.data import Prepared
from lit_knn.data.image_files import read_image_files
from lit_knn.data.image_source import Options, open_source
from lit_knn.data.prepared import read_prepared, verify
from lit_knn.data.prepared_writer import prepare, write_prepared
from lit_knn.estimators import KNN, Exact
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of
from tests.image_files import encoded, image_folder, labels_json, pixels, refusal, write_folder, write_zip

# Damaged pixels


@pytest.mark.parametrize("place", [128, 500, -1])
def test_a_flipped_bit_is_found_by_verify(tmp_path, place, capsys):
    path = tmp_path / "x.npy"
    prepare(image_folder(tmp_path / "s"), path)
    main(["--verify", str(path)])
    assert "20 images are what was prepared" in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    message = refusal(verify, path)
    assert f"{path} is damaged: its pixels are not what was prepared" in message
    with pytest.raises(SystemExit) as caught:
        main(["--verify", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


# Files that change while they are used


@pytest.mark.parametrize("change", ["content", "added", "labels", "zip"])
def test_a_source_that_changes_meanwhile_is_told(tmp_path, change):
    folder = image_folder(tmp_path / "s", number=6)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = write_zip(tmp_path / "s.zip", files) if change == "zip" else folder

    def meddle():
        other = encoded(pixels(6, 5, 3))
        if change == "content":
            (folder / "0001.png").write_bytes(other)
        elif change == "added":
            (folder / "0000a.png").write_bytes(other)
        elif change == "labels":
            write_folder(folder, labels_json([[f"{i:04d}.png", 5] for i in range(6)]))
        else:
            write_zip(tmp_path / "new.zip", files | {"0002.png": other})
            os.replace(tmp_path / "new.zip", path)

    with open_source(path, Options()) as source:

        def read(i):
            # The last image is read when the others are written.
            if i == 5:
                meddle()
            return source.read(i)

        message = refusal(write_prepared, source._replace(read=read), tmp_path / "x.npy", 1, 2)
    assert "was changed while it was prepared" in message
    assert not (tmp_path / "x.npy").exists()
    # The same command makes the file of what is there now.
    if change != "added":  # An image has no label then.
        prepare(path, tmp_path / "x.npy")
        np.testing.assert_array_equal(read_prepared(tmp_path / "x.npy").images, read_image_files(path)[0])


@pytest.mark.parametrize("index", [FaissIndex("SQ8"), TorchIndex()])
def test_a_file_that_is_cut_during_a_run_is_told(tmp_path, index):
    prepare(image_folder(tmp_path / "s"), tmp_path / "x.npy")
    data = Prepared(str(tmp_path / "x.npy"), batch_size=4, index=index)
    data.setup("fit")
    reference, z = data.reference, torch.zeros(2, 3, 6, 5)
    uses = [
        lambda: next(iter(data.train_dataloader())),
        lambda: KNN(4, 4).bind(reference).posterior_mean(z, 1.0),
        lambda: Exact().bind(reference).posterior_mean(z, 1.0),
        lambda: reference.gather(torch.tensor([3])),
        lambda: classes_of(reference)[1].gather(torch.tensor([0])),
        lambda: reference.mean(),
    ]
    for use in uses:
        use()
    # One byte less: the pages of such a small file stay, so that nothing ends this process.
    length = (tmp_path / "x.npy").stat().st_size
    os.truncate(tmp_path / "x.npy", length - 1)
    reference = ReferenceSet(reference.images, index=index, labels=reference.labels)
    reference.watch(data.check_file)
    for use in uses:
        assert f"was cut from {length} to {length - 1} bytes" in refusal(use)


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


# Stale data


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Options(center_crop=True), Options()),
        (Options(size=4, center_crop=True), Options(size=4)),
        (Options(rgb=True), Options()),
        (Options(size=5), Options()),
        (Options(labels_from_folders=True), Options()),
    ],
)
def test_a_file_of_other_options_is_not_taken(tmp_path, first, second):
    # Square colour images in one folder: each option leaves the shape as it is.
    size = first.size or 5
    files = {f"{folder}/0.png": encoded(pixels(size, size, 3)) for folder in "abc"}
    source = write_folder(tmp_path / "s", files | labels_json([[name, 0] for name in files]))
    prepare(source, tmp_path / "x.npy", first)
    assert "is there already" in refusal(prepare, source, tmp_path / "x.npy", second)
    prepare(source, tmp_path / "y.npy", second)
    assert "is there already" in refusal(prepare, source, tmp_path / "y.npy", first)


def test_the_number_of_threads_is_the_one_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([str(image_folder(tmp_path / "s")), str(tmp_path / "x.npy"), "--workers", "0"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --workers must be at least 1, got 0\n"


def test_a_file_that_grows_has_all_its_pixels(tmp_path):
    prepare(image_folder(tmp_path / "s"), tmp_path / "x.npy")
    found = read_prepared(tmp_path / "x.npy")
    with (tmp_path / "x.npy").open("ab") as file:
        file.write(b"more")
    found.check_file()
