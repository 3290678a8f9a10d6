"""Opens what holds images: folders, zips, tars, tables of Hugging Face and LMDB; it finds the kind by looking."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_knn.common.errors import InputError, reading
from lit_knn.data.file_names import advice_for
from lit_knn.data.files import Files, existing, folder_files, holds_images, say, zip_files
from lit_knn.data.hugging_face import data_set_files, is_data_set
from lit_knn.data.lmdb_files import is_lmdb, lmdb_files
from lit_knn.data.tar_files import tar_files, tar_paths


@contextmanager
def opened(path: str | os.PathLike[str], label_key: str | None = None) -> Iterator[Files]:
    """Open a store of images. One line says how many image files are left out.

    Args:
        path: a folder or zip of image files; a tar, several (`images-{000..009}.tar`) or a folder of tars, as of
            WebDataset; a parquet file or a folder of them, a folder of `datasets.Dataset.save_to_disk`, or
            `hf://user/name` for a data set of the Hub; a folder of an LMDB.
        label_key: the column of a table, or the key in the `.json` files of a tar, that has the labels.
    """
    text = os.fspath(path)
    # Tables or tars may lie beside image files, as do the ones that were unpacked there.
    folder = Path(text).expanduser()
    if holds_images(folder):
        if tar_paths(text) or any(folder.glob("*.parquet")) or any(folder.glob("data/*.parquet")):
            rule = "give the path of tables or tars to read these"
            say(f"{text}: the image files are read, and not what lies beside them; {rule}")
    else:
        if is_data_set(text):
            yield data_set_files(text, label_key)
            return

        tars = tar_paths(text)
        if tars:
            yield tar_files(text, tars, label_key)
            return

    path = existing(path)
    if label_key is not None:
        raise InputError(f"{path} is no table and no tar, so it has no labels of key {label_key}")

    if is_lmdb(path):
        yield lmdb_files(path)
    elif path.is_dir():
        yield folder_files(path)
    elif path.suffix.lower() == ".zip":
        with reading(path, " as a zip file"):
            archive = zipfile.ZipFile(path)
        with archive:
            yield zip_files(path, archive)
    else:
        kinds = "a folder, zip, tar, parquet file or LMDB"
        raise InputError(f"{path} is not {kinds}{advice_for(path)}")
