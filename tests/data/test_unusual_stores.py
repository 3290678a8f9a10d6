"""Tables, tars, LMDBs and arrays as others write them: read as their own libraries do, or refused in one line."""

import json

import datasets
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset

from lit_knn.common.errors import InputError
from lit_knn.data.array_files import read_array_file
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepared_writer import prepare
from main import main
from tests.data.test_stores import NAMES, N, pixels, table, write_tar
from tests.image_files import encoded, refusal


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def content():
    return [encoded(image) for image in pixels()]


def write_parquet(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def check_pixels(path, expected=None, **options):
    images, labels, names = read_image_files(path, **options)
    expected = pixels() if expected is None else expected
    np.testing.assert_array_equal(images, np.moveaxis(expected, 3, 1))
    return labels, names


def test_folder_of_the_hub_gives_its_training_images(tmp_path, capsys):
    table().select(range(8)).to_parquet(tmp_path / "hub/data/train-00000.parquet")
    table().select(range(8, N)).to_parquet(tmp_path / "hub/data/train-00001.PARQUET")
    (tmp_path / "hub/README.md").write_text("# A data set\n")
    labels, names = check_pixels(tmp_path / "hub")
    assert (labels.tolist(), names) == (table()["label"], NAMES)

    table().select([0]).to_parquet(tmp_path / "hub/data/test-00000.parquet")
    check_pixels(tmp_path / "hub")
    assert "the split train is read, not test" in capsys.readouterr().err
    for file in (tmp_path / "hub/data").glob("train*"):
        file.rename(file.with_name(file.name.replace("train", "validation")))
    words = "has the splits test, validation: give the files of one"
    assert words in refusal(read_image_files, tmp_path / "hub")
    # A picture in its card does not hide that the tables are not read.
    (tmp_path / "hub/card.png").write_bytes(encoded(pixels()[0]))
    assert len(read_image_files(tmp_path / "hub")[0]) == 1
    assert "not what lies beside them" in capsys.readouterr().err


def test_files_without_rows_are_left_out_and_an_empty_set_is_refused(tmp_path):
    table().select([]).to_parquet(tmp_path / "train-0.parquet")
    words = "train-0.parquet holds no rows"
    assert words in refusal(read_image_files, tmp_path / "train-0.parquet")
    table().to_parquet(tmp_path / "train-1.parquet")
    check_pixels(tmp_path)


def test_a_cache_that_cannot_be_written_is_named_beside_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/dev/null/cache")
    table().to_parquet(tmp_path / "x.parquet")
    line = refusal(read_image_files, tmp_path / "x.parquet")
    assert "x.parquet cannot be read as a data set: /dev/null/cache" in line


def test_texts_are_the_classes_of_class_encode_column(tmp_path):
    texts = [NAMES[(i * 5) % 3] for i in range(N)]
    path = write_parquet(tmp_path / "x.parquet", image=content(), kind=texts)
    labels, names = check_pixels(path, label_key="kind")
    encoded_table = datasets.Dataset.from_dict({"kind": texts}).class_encode_column("kind")
    assert labels.tolist() == encoded_table["kind"]
    assert names == encoded_table.features["kind"].names


def test_columns_of_images_are_chosen_or_refused(tmp_path, capsys):
    files = [{"bytes": one, "path": None} for one in content()]
    hashes = [b"hash"] * N
    check_pixels(write_parquet(tmp_path / "a.parquet", sha=hashes, image=files))
    path = write_parquet(tmp_path / "b.parquet", sha=hashes, image=content())
    assert "several, sha, image: keep one" in refusal(read_image_files, path)

    path = write_parquet(tmp_path / "c.parquet", image=[*content()[1:], None])
    assert "row 11 cannot be read: it has no image" in refusal(read_image_files, path)
    labels = [None, *range(N - 1)]
    path = write_parquet(tmp_path / "d.parquet", image=content(), label=labels)
    assert check_pixels(path) == (None, None)
    words = "the column label has no label in 1 of 12 rows"
    assert words in refusal(read_image_files, path, labels_used=True)
    path = write_parquet(tmp_path / "e.parquet", image=content(), label=[NAMES[0]] * N)
    assert check_pixels(path) == (None, None)
    assert "the column label has texts, which label_key=label would" in capsys.readouterr().err
    path = write_parquet(tmp_path / "f.parquet", image=content(), label=[0.5] * N)
    line = refusal(read_image_files, path, labels_used=True)
    assert "label has float64 and no integers; name the column of the labels with label_key" in line
    table().with_format("torch").save_to_disk(tmp_path / "tensors")
    assert check_pixels(tmp_path / "tensors")[0].tolist() == table()["label"]


def test_labels_of_a_key_are_never_left_out_by_prepare(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", image=content(), score=[0.5] * N)
    prepare(path, tmp_path / "plain.npy")
    with pytest.raises(SystemExit):
        main(["prepare", str(path), str(tmp_path / "x.npy"), "--label-key", "score"])
    assert not (tmp_path / "x.npy").exists()


def test_suffixes_in_capitals_are_those_of_webdataset(tmp_path):
    files = {f"{i:02}.PNG": one for i, one in enumerate(content())}
    files |= {f"{i:02}.CLS": str(i % 4).encode() for i in range(N)}
    # In a tar of webdataset, the files of a key lie side by side.
    write_tar(tmp_path / "x.TAR", dict(sorted(files.items())))
    rows = webdataset.WebDataset(f"file:{tmp_path}/x.TAR", shardshuffle=False).to_tuple("cls")
    expected = [int(label) for (label,) in rows]
    for path in (tmp_path / "x.TAR", tmp_path):
        assert check_pixels(path)[0].tolist() == expected


@pytest.mark.parametrize("value", ["1.7", "true", "null", '"cat"', "[1]"])
def test_json_labels_that_are_no_integers_are_refused(value, tmp_path):
    files = {"0.png": content()[0], "0.json": f'{{"kind": {value}}}'.encode()}
    write_tar(tmp_path / "x.tar", files)
    words = f"kind is {json.loads(value)!r}, and labels are integers"
    assert words in refusal(read_image_files, tmp_path / "x.tar", label_key="kind")
    assert "it has no key age" in refusal(read_image_files, tmp_path / "x.tar", label_key="age")
    words = "give its .json files' key as label_key"
    assert words in refusal(read_image_files, tmp_path / "x.tar", labels_used=True)
    assert "as paths with braces" in refusal(read_image_files, tmp_path / "x-{0..1.tar")


@pytest.mark.parametrize("in_folder", [True, False])
def test_lmdb_has_keys_that_are_not_of_images(in_folder, tmp_path, capsys):
    path = tmp_path / "x.lmdb"
    environment = lmdb.open(str(path), map_size=2**24, subdir=in_folder)
    with environment, environment.begin(write=True) as transaction:
        transaction.put(b"length", b"12")
        for i, one in enumerate(content()):
            transaction.put(f"image-{i:09}".encode(), one)
    check_pixels(path)
    assert "left out: length" in capsys.readouterr().err

    environment = lmdb.open(str(tmp_path / "empty"))
    environment.close()
    assert "holds no images" in refusal(read_image_files, tmp_path / "empty")
    (tmp_path / "bad.mdb").write_bytes(b"no LMDB")
    assert "cannot be read as an LMDB" in refusal(read_image_files, tmp_path / "bad.mdb")


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
def test_arrays_of_nothing_are_refused(dtype, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((0, 3, 4, 4), dtype))
    with pytest.raises(InputError, match="holds no items"):
        read_array_file(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", np.array(["a", "b"]))
    with pytest.raises(InputError, match="holds <U1, and images are numbers"):
        read_array_file(tmp_path / "x.npz")


def test_what_has_the_labels_is_said_where_it_was_a_choice(tmp_path, capsys):
    path = write_parquet(tmp_path / "x.parquet", image=content(), fine_label=[3] * N, label=[1] * N)
    labels, _ = check_pixels(path)
    line = capsys.readouterr().err
    assert "labels are sought in the column label, not in fine_label; label_key chooses" in line
    assert labels.tolist() == [1] * N
    labels, _ = check_pixels(path, label_key="fine_label")
    assert labels.tolist() == [3] * N

    # WebDataset's key ends at the first dot, and these label files are named after the whole name.
    files = {f"a.b/{i}.v1.png": encoded(pixels()[i]) for i in range(N)}
    write_tar(tmp_path / "x.tar", files | {f"a.b/{i}.v1.CLS": b"1" for i in range(N)})
    images, labels, _ = read_image_files(tmp_path / "x.tar")
    assert labels is None
    assert len(images) == N
    line = f"x.tar: none of its {N} .cls files, such as a.b/0.v1.CLS, has an image's name up to its"
    assert line in capsys.readouterr().err
    with pytest.raises(InputError, match=r"has no labels: none of its"):
        read_image_files(tmp_path / "x.tar", labels_used=True)


@pytest.mark.parametrize("kind", [np.int64, bool])
def test_numbers_that_no_set_stores_are_refused_with_their_file(tmp_path, kind):
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 8, 8), kind))
    words = rf"x\.npy holds {np.dtype(kind)}: give images as uint8, and other numbers as float32"
    with pytest.raises(InputError, match=words):
        read_array_file(tmp_path / "x.npy")
