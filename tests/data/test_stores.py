"""Tables of Hugging Face, tars of WebDataset and LMDBs: images and labels are those of the libraries themselves."""

import io
import json
import tarfile

import datasets
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
from PIL import Image

from lit_knn.common.errors import InputError
from lit_knn.data import Images
from lit_knn.data.image_files import read_image_files, read_image_labels
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from tests.image_files import encoded

N = 12
NAMES = ["cat", "dog", "élan"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def pixels():
    return np.random.default_rng(0).integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)


def table():
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    features["age"] = datasets.Value("int64")
    columns = {
        "image": [Image.fromarray(one) for one in pixels()],
        "label": [i % 3 for i in range(N)],
        "age": list(range(100, 100 + N)),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def plain_table():
    """A parquet file of another program: the files' bytes and a column of numbers."""
    content = [encoded(one) for one in pixels()]
    return pyarrow.table({"picture": content, "label": list(range(N)), "age": [5] * N})


def saved(kind, folder):
    """Write the table as a kind of file, and return its path."""
    path = folder / kind
    if kind == "saved":
        table().save_to_disk(path)
    elif kind == "splits":
        splits = {"train": table(), "test": table().select([0])}
        datasets.DatasetDict(splits).save_to_disk(path)
    elif kind == "one.parquet":
        table().to_parquet(path)
    else:
        path.mkdir()
        table().select(range(5)).to_parquet(path / "train-0.parquet")
        table().select(range(5, N)).to_parquet(path / "train-1.parquet")
    return str(path)


@pytest.mark.parametrize("kind", ["saved", "splits", "one.parquet", "several"])
def test_tables_have_the_images_and_classes_of_datasets(kind, tmp_path, capsys):
    images, labels, names = read_image_files(saved(kind, tmp_path))
    expected = table()
    np.testing.assert_array_equal(
        images, [np.moveaxis(np.asarray(x), 2, 0) for x in expected["image"]]
    )
    np.testing.assert_array_equal(labels, expected["label"])
    assert names == NAMES
    assert ("the split train is read, not test" in capsys.readouterr().err) == (kind == "splits")


def test_parquet_of_another_program_is_read_by_its_bytes(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(plain_table(), path)
    images, labels, names = read_image_files(path)
    np.testing.assert_array_equal(images, np.moveaxis(pixels(), 3, 1))
    assert (labels.tolist(), names) == (list(range(N)), None)
    assert read_image_files(path, label_key="age")[1].tolist() == [5] * N


def test_unclear_tables_are_refused_by_their_columns(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), path)
    with pytest.raises(InputError, match="the columns a, b, and no column of images"):
        read_image_files(path)
    two = table().add_column("again", [encoded(one) for one in pixels()])
    two = two.cast_column("again", datasets.Image())
    two.to_parquet(path)
    with pytest.raises(InputError, match="several, image, again: keep one"):
        read_image_files(path)
    table().to_parquet(path)
    with pytest.raises(InputError, match="has no column size; it has image, label, age"):
        read_image_files(path, label_key="size")
    splits = datasets.DatasetDict({"a": table(), "b": table()})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="has the splits a, b: give the files of one"):
        read_image_files(tmp_path / "splits")
    # Without this it waits for a network.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="hf://nobody/nothing cannot be read as a data set"):
        read_image_files("hf://nobody/nothing")


def write_shards(folder):
    """Write two tars by webdataset itself, with labels of both kinds."""
    for shard, rows in enumerate(np.split(np.arange(N), 2)):
        with webdataset.TarWriter(str(folder / f"w-{shard:02}.tar")) as sink:
            for i in rows:
                sample = {"__key__": f"{i:05}", "png": encoded(pixels()[i]), "cls": int(i % 3)}
                sink.write(sample | {"json": {"age": int(i)}})


@pytest.mark.parametrize("name", ["w-{00..01}.tar", "."])
def test_tars_have_the_images_and_labels_of_webdataset(name, tmp_path):
    write_shards(tmp_path)
    images, labels, _ = read_image_files(f"{tmp_path}/{name}")
    urls = f"file:{tmp_path}/w-{{00..01}}.tar"
    theirs = list(
        webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("png", "cls")
    )
    np.testing.assert_array_equal(images, [np.moveaxis(image, 2, 0) for image, _ in theirs])
    assert labels.tolist() == [label for _, label in theirs]
    assert read_image_files(f"{tmp_path}/{name}", label_key="age")[1].tolist() == list(range(N))


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_plain_tar_is_a_folder_whose_names_may_repeat_in_another(tmp_path):
    files = {f"./{kind}/0.png": encoded(pixels()[i]) for i, kind in enumerate(NAMES)}
    write_tar(tmp_path / "a.tar", files)
    images, labels, names = read_image_files(tmp_path / "a.tar", labels_from_folders=True)
    assert (len(images), labels.tolist(), names) == (3, [0, 1, 2], NAMES)
    write_tar(tmp_path / "b.tar", files)
    assert len(read_image_files(tmp_path)[0]) == 6


def test_tables_and_tars_beside_images_are_not_read(tmp_path):
    write_tar(tmp_path / "a.tar", {"0.png": encoded(pixels()[0])})
    (tmp_path / "table.parquet").write_bytes(b"no table")
    for folder in ("sub", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "one.png").write_bytes(encoded(pixels()[1]))
    images, _, _ = read_image_files(tmp_path)
    np.testing.assert_array_equal(images, [np.moveaxis(pixels()[1], 2, 0)] * 2)


def test_tar_that_holds_a_name_twice_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(2):
            content = encoded(pixels()[i])
            member = tarfile.TarInfo("0.png")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(InputError, match=r"holds two files of the name 0\.png"):
        read_image_files(tmp_path / "a.tar")


def test_tar_that_was_cut_or_added_to_another_loses_nothing_in_silence(tmp_path, capsys):
    for name in ("a", "b"):
        write_tar(
            tmp_path / f"{name}.tar", {f"{name}{i}.png": encoded(pixels()[i]) for i in (0, 1)}
        )
    whole = (tmp_path / "a.tar").read_bytes()
    # GNU's tar and `cat` write such files, of which every reader sees the first part alone.
    (tmp_path / "both.tar").write_bytes(whole + (tmp_path / "b.tar").read_bytes())
    with pytest.raises(InputError, match=r"both\.tar has a second tar behind its end"):
        read_image_files(tmp_path / "both.tar")

    with tarfile.open(tmp_path / "a.tar") as archive:
        first, second = archive
    cut = second.offset
    assert first.offset_data < cut < second.offset_data
    (tmp_path / "cut.tar").write_bytes(whole[:cut])
    assert len(read_image_files(tmp_path / "cut.tar")[0]) == 1
    assert "cut.tar: it may have been cut" in capsys.readouterr().err
    (tmp_path / "cut.tar").write_bytes(whole[: cut + 900])
    with pytest.raises(InputError, match=r"cut\.tar cannot be read as an uncompressed tar"):
        read_image_files(tmp_path / "cut.tar")
    # After a damaged header tarfile ends in silence.
    damaged = bytearray(whole)
    damaged[cut + 3] ^= 1
    (tmp_path / "cut.tar").write_bytes(damaged)
    with pytest.raises(InputError, match=rf"cut\.tar is damaged at byte {cut:,}: no file behind"):
        read_image_files(tmp_path / "cut.tar")
    # Zeros behind the end are padding, and a signature is no tar.
    (tmp_path / "a.tar").write_bytes(whole + bytes(10240) + b"signature")
    assert len(read_image_files(tmp_path / "a.tar")[0]) == 2
    assert "may have been cut" not in capsys.readouterr().err


def test_images_of_a_sample_are_all_read_and_a_line_says_so(tmp_path, capsys):
    one = encoded(pixels()[0])
    write_tar(
        tmp_path / "a.tar", {f"{i}.{kind}": one for i in (0, 1) for kind in ("jpg", "mask.png")}
    )
    assert len(read_image_files(tmp_path / "a.tar")[0]) == 4
    assert (
        "2 of 2 samples have several images, such as 0.jpg, 0.mask.png" in capsys.readouterr().err
    )
    # Numbered pictures are no parts of a sample.
    shots = {f"{shot}.{i}.png": one for shot in "ab" for i in range(3)}
    write_tar(tmp_path / "b.tar", shots)
    assert len(read_image_files(tmp_path / "b.tar")[0]) == 6
    assert "several" not in capsys.readouterr().err


def test_tar_whose_labels_are_no_classes_is_read_without_them(tmp_path, capsys):
    files = {f"{i}.png": encoded(pixels()[i]) for i in range(4)}
    some = {"0.cls": b"1", "2.cls": b"0\n"}
    words = {f"{i}.cls": b"cat" for i in range(4)}
    for labels, problem in (
        (some, "2 of 4 images have no .cls file, 1.png for one"),
        (words, "0.cls cannot be read as a label: invalid literal for int"),
    ):
        write_tar(tmp_path / "a.tar", files | labels)
        images, numbers, _ = read_image_files(tmp_path / "a.tar")
        assert (len(images), numbers) == (4, None)
        line = capsys.readouterr().err
        assert f"a.tar: {problem}" in line
        assert line.endswith("; the images have no labels\n")
        with pytest.raises(InputError, match=f"a.tar has no labels: {problem}"):
            read_image_labels(tmp_path / "a.tar")


def test_tar_without_the_labels_of_a_key_is_refused(tmp_path):
    files = {f"{i}.png": encoded(pixels()[i]) for i in range(4)}
    write_tar(tmp_path / "a.tar", files | {f"{i}.json": json.dumps({}).encode() for i in range(4)})
    with pytest.raises(InputError, match=r"0.json cannot be read as a label: .*age"):
        read_image_files(tmp_path / "a.tar", label_key="age")
    (tmp_path / "b.tar").write_bytes(b"no tar")
    with pytest.raises(InputError, match=r"b.tar cannot be read as an uncompressed tar"):
        read_image_files(tmp_path / "b.tar")


def test_lmdb_has_the_images_of_its_keys_without_labels(tmp_path):
    environment = lmdb.open(str(tmp_path / "lsun"), map_size=2**24)
    with environment, environment.begin(write=True) as transaction:
        for i, image in enumerate(pixels()):
            transaction.put(f"key {i:02}".encode(), encoded(image, "WEBP", lossless=True))
    images, labels, _ = read_image_files(tmp_path / "lsun")
    np.testing.assert_array_equal(images, np.moveaxis(pixels(), 3, 1))
    assert labels is None
    # At its end a preparation opens its source again, to see whether it has changed.
    prepare(tmp_path / "lsun", tmp_path / "x.npy")
    np.testing.assert_array_equal(read_prepared(tmp_path / "x.npy").images, images)
    with pytest.raises(InputError, match="an LMDB has none"):
        read_image_files(tmp_path / "lsun", labels_used=True)


def test_the_one_door_reads_what_prepare_wrote_and_what_it_read(tmp_path):
    path = saved("one.parquet", tmp_path)
    prepare(path, tmp_path / "x.npy")
    np.testing.assert_array_equal(
        read_prepared(tmp_path / "x.npy").images, np.moveaxis(pixels(), 3, 1)
    )
    np.savez(tmp_path / "x.npz", images=pixels(), labels=np.arange(N) % 3)
    write_shards(tmp_path)

    for source in (path, tmp_path / "x.npy", tmp_path / "x.npz", f"{tmp_path}/w-{{00..01}}.tar"):
        data = Images(str(source), batch_size=4)
        data.needs_labels = True
        data.setup()
        assert data.reference.N == N
        assert data.reference.labels.tolist() == [i % 3 for i in range(N)]
        np.testing.assert_array_equal(data.reference.images, np.moveaxis(pixels(), 3, 1))
        if source in (path, tmp_path / "x.npy"):
            assert data.class_names == NAMES
