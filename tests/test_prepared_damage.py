"""Prepared files that are damaged, cut or of other data: found by checksums, lengths and fingerprints."""

import json
import os
import zlib

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
from lit_knn.reference import ReferenceSet, shard_rows
from lit_knn.reference.classes import classes_of
from tests.image_files import encoded, labels_json, pixels, refusal, write_folder, write_zip

MIB = 2**20


def image_folder(path, number=20, size=(6, 5), classes=4):
    files = {f"{i:04d}.png": encoded(pixels(*size, 3)) for i in range(number)}
    return write_folder(path, files | labels_json([[name, i * classes // number] for i, name in enumerate(files)]))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A prepared file of 12 images, 300 KB each: 3.5 MiB."""
    folder = tmp_path_factory.mktemp("large")
    smooth = np.broadcast_to(np.arange(320, dtype=np.uint8)[:, None, None], (320, 320, 3))
    source = write_folder(folder / "s", {f"{i:02d}.png": encoded(smooth + np.uint8(i)) for i in range(12)})
    prepare(source, folder / "x.npy")
    return folder / "x.npy"


def copied(path, folder):
    for part in (path, path.with_suffix(".json")):
        (folder / part.name).write_bytes(part.read_bytes())
    return folder / path.name


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


# Checksums


def test_the_json_holds_the_checksum_of_each_mebibyte(large, tmp_path):
    content = np.load(large).tobytes()
    blocks = [zlib.crc32(content[i : i + MIB]) for i in range(0, len(content), MIB)]
    assert len(blocks) == 4
    assert json.loads(large.with_suffix(".json").read_text())["crc32"] == blocks
    # An interrupted preparation in other blocks gives the same.
    again = tmp_path / "y.npy"
    with open_source(large.with_name("s"), Options()) as source:
        broken = source._replace(read=lambda i: source.read(i) if i < 7 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_prepared(broken, again, workers=1, block_images=3)
    prepare(large.with_name("s"), again)
    assert json.loads(again.with_suffix(".json").read_text())["crc32"] == blocks


@pytest.mark.parametrize("place", [200, 128 + MIB - 1, 128 + MIB, 128 + 2 * MIB + 5, -1])
def test_a_flipped_bit_is_found_at_the_start_of_a_run_and_by_verify(large, tmp_path, place, capsys):
    path = copied(large, tmp_path)
    read_prepared(path)
    main(["--verify", str(path)])
    assert "12 images are what was prepared" in capsys.readouterr().out
    flip(path, place)
    offset = (place if place >= 0 else path.stat().st_size + place) - 128
    image = offset // (3 * 320 * 320)
    for check in (read_prepared, verify):
        message = refusal(check, path)
        assert str(path) in message
        first, last = map(int, message.split("among images ")[1].split(" are")[0].split(" to "))
        assert first <= image <= last
        assert last - first <= 4
    with pytest.raises(SystemExit) as caught:
        main(["--verify", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


def test_the_images_of_a_damaged_block_are_named_and_no_others(tmp_path):
    # Each block of checksums holds exactly one of these images.
    source = write_folder(tmp_path / "s", {f"{i}.png": encoded(np.zeros((1024, 1024), np.uint8)) for i in range(3)})
    prepare(source, tmp_path / "x.npy")
    flip(tmp_path / "x.npy", 128 + MIB + 7)
    assert "pixels among images 1 to 1 are" in refusal(verify, tmp_path / "x.npy")


def test_a_file_of_an_earlier_version_is_read_and_its_hash_still_verified(large, tmp_path):
    path = copied(large, tmp_path)
    fields = json.loads(path.with_suffix(".json").read_text())
    del fields["crc32"]
    path.with_suffix(".json").write_text(json.dumps(fields))
    assert torch.equal(read_prepared(path).images, read_prepared(large).images)
    verify(path)
    flip(path, 3000)
    read_prepared(path)
    assert "its pixels are not what was prepared" in refusal(verify, path)


@pytest.mark.parametrize("sums", [[], [1, 2], "crc", [1.5, 2, 3, 4], [True] * 4, {"0": 1}])
def test_checksums_that_cannot_be_are_refused(large, tmp_path, sums):
    path = copied(large, tmp_path)
    fields = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(fields | {"crc32": sums}))
    assert "not one checksum for each block" in refusal(read_prepared, path)


def test_labels_outside_the_range_are_refused(tmp_path):
    prepare(image_folder(tmp_path / "s"), tmp_path / "x.npy")
    fields = json.loads((tmp_path / "x.json").read_text())
    for bad in (-1, 2**31):
        (tmp_path / "x.json").write_text(json.dumps(fields | {"labels": [0] * 19 + [bad]}))
        assert "has a label outside" in refusal(read_prepared, tmp_path / "x.npy")


@pytest.mark.parametrize("args", [[], ["a"], ["--verify", "x.npy", "a", "b"], ["--verify", "x.npy", "--rgb"]])
def test_command_lines_that_mean_nothing_are_refused(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_the_number_of_threads_is_the_one_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([str(image_folder(tmp_path / "s")), str(tmp_path / "x.npy"), "--workers", "0"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --workers must be at least 1, got 0\n"


# Files that change while they are used


@pytest.mark.parametrize("change", ["content", "deleted", "added", "labels", "zip"])
def test_a_source_that_changes_meanwhile_is_told(tmp_path, change):
    folder = image_folder(tmp_path / "s", number=6)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = write_zip(tmp_path / "s.zip", files) if change == "zip" else folder

    def meddle():
        other = encoded(pixels(6, 5, 3))
        if change == "content":
            (folder / "0001.png").write_bytes(other)
        elif change == "deleted":
            (folder / "0001.png").unlink()
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
    if change not in ("deleted", "added"):  # They have not one label for each image.
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


def test_another_file_under_the_name_of_a_mapped_file_is_no_cut(tmp_path):
    prepare(image_folder(tmp_path / "s"), tmp_path / "x.npy")
    found = read_prepared(tmp_path / "x.npy")
    (tmp_path / "y").write_bytes(b"short")
    os.replace(tmp_path / "y", tmp_path / "x.npy")
    found.check_file()


def test_a_file_that_grows_has_all_its_pixels(tmp_path):
    prepare(image_folder(tmp_path / "s"), tmp_path / "x.npy")
    found = read_prepared(tmp_path / "x.npy")
    with (tmp_path / "x.npy").open("ab") as file:
        file.write(b"more")
    found.check_file()


@pytest.mark.parametrize("done", [5, 20, -3, 10**9, "x", None, 7.5])
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
    files = {f"a/{i}.png": encoded(pixels(size, size, 3)) for i in range(3)}
    source = write_folder(tmp_path / "s", files | labels_json([[name, 0] for name in files]))
    prepare(source, tmp_path / "x.npy", first)
    assert "is there already" in refusal(prepare, source, tmp_path / "x.npy", second)
    prepare(source, tmp_path / "y.npy", second)
    assert "is there already" in refusal(prepare, source, tmp_path / "y.npy", first)


@pytest.mark.parametrize("known", [True, False])
def test_the_whole_its_shards_and_its_classes_have_fingerprints_of_their_own(tmp_path, known):
    prepare(image_folder(tmp_path / "s", number=24), tmp_path / "x.npy")
    data = Prepared(str(tmp_path / "x.npy"), batch_size=1)
    data.setup()
    images, labels = data.reference.images, data.reference.labels
    sha256 = data.sha256() if known else None
    whole = ReferenceSet(images, labels=labels, sha256=sha256)
    prints = [whole.fingerprint(), *(part.fingerprint() for part in classes_of(whole).values())]
    scattered = ReferenceSet(images, labels=torch.arange(24) % 4, sha256=sha256)
    prints += [part.fingerprint() for part in classes_of(scattered).values()]
    assert len(set(prints)) == 9
    assert prints[1:5] == [
        part.fingerprint() for part in classes_of(ReferenceSet(images, labels=labels, sha256=sha256)).values()
    ]


def shard_of(path, rank, ranks):
    """The shard that a data module on one rank of several makes, without the other processes."""

    class Trainer:
        global_rank, world_size = rank, ranks
        overfit_batches = 0

    data = Prepared(str(path), batch_size=1, sharded=True)
    data.trainer = Trainer()
    data.setup()
    return data.reference


def test_shards_of_a_prepared_file_have_fingerprints_of_their_own(tmp_path):
    prepare(image_folder(tmp_path / "s", number=12), tmp_path / "x.npy")
    shards = [shard_of(tmp_path / "x.npy", rank, ranks) for ranks in (1, 2, 3) for rank in range(ranks)]
    assert [len(shard.images) for shard in shards] == [12, 6, 6, 4, 4, 4]
    assert len({shard.local.fingerprint() for shard in shards}) == 6
    assert shards[1].local.fingerprint() == shard_of(tmp_path / "x.npy", 0, 2).local.fingerprint()
    images = read_prepared(tmp_path / "x.npy").images
    for rank, shard in enumerate(shards[3:]):
        assert torch.equal(shard.images, images[shard_rows(12, rank, 3)])
