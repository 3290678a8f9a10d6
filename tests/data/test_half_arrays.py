"""Files of float16 and bfloat16: data modules leave them on the disk, and find what is in them."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lit_knn.data import Arrays, Digits, Images, Latents
from lit_knn.data.array_files import read_array_file
from lit_knn.data.autoencoders import PCA
from lit_knn.data.reading import reference_from
from lit_knn.estimators import Exact
from lit_knn.reference import ReferenceSet
from tests.image_files import refusal
from tests.toys import rng

N, SHAPE = 60, (4, 3, 5)


def save(path, values):
    """Write a tensor of 16-bit floats as `np.save` writes NumPy's and JAX's."""
    is_known = values.dtype == torch.float16
    np.save(path, values.numpy() if is_known else values.view(torch.int16).numpy().view("V2"))
    return str(path)


@pytest.fixture(params=["float16", "bfloat16"])
def stored(request, tmp_path):
    """The path of a file, and what is in it."""
    values = torch.randn(N, *SHAPE, generator=rng()).to(getattr(torch, request.param))
    return save(tmp_path / "latents.npy", values), values


def mapped_files(tensor):
    """The files whose pages hold the first value of a tensor."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[5:]
    return []


@pytest.mark.parametrize("kind", [Arrays, Images])
def test_the_file_stays_on_the_disk_and_its_parts_are_views(kind, stored, capsys):
    path, values = stored
    layout = kind(path).stored()
    assert (layout.shape, layout.value_bytes) == ((N, *SHAPE), 2)
    data = kind(path, held_out=7, batch_size=8)
    data.setup("fit")
    assert str(values.dtype).removeprefix("torch.") in capsys.readouterr().err

    parts = [data.reference, data.held_out_reference]
    for part in parts:
        assert part.images.dtype == values.dtype
        assert mapped_files(part.images.images) == [path]
    rows = torch.cat([part.images.rows for part in parts])
    assert rows.sort().values.tolist() == list(range(N))
    x = torch.cat([part.gather(torch.arange(part.N)) for part in parts])
    assert torch.equal(x, values[rows].float())
    batch, _ = next(iter(data.train_dataloader()))
    assert batch.dtype == torch.float32


def test_ranks_map_their_rows_and_know_all_labels(stored, tmp_path):
    path, values = stored
    whole = reference_from(path)
    assert mapped_files(whole.images) == [path]
    shards = []
    for rank in range(2):
        data = Arrays(path, sharded=True)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        with patch("lit_knn.data.base.rank_and_size", lambda rank=rank: (rank, 2)):
            data.setup()
        shards.append(data.reference.local.images)
        assert mapped_files(shards[-1]) == [path]
    assert torch.equal(torch.cat(shards), values)

    z = whole.gather(torch.arange(5)) + 0.5
    same = ReferenceSet(values.float())
    torch.testing.assert_close(
        Exact().bind(whole).posterior_mean(z, 0.5), Exact().bind(same).posterior_mean(z, 0.5)
    )


def test_an_npz_keeps_16_bits_and_its_labels(tmp_path):
    values = np.float16(np.random.default_rng(0).normal(size=(N, *SHAPE)))
    np.savez(tmp_path / "a.npz", arr_0=values, arr_1=np.arange(N) % 3)
    data = Images(str(tmp_path / "a.npz"))
    data.setup()
    assert data.reference.images.dtype == torch.float16
    np.testing.assert_array_equal(data.reference.images, values)
    assert data.reference.labels.tolist() == [i % 3 for i in range(N)]
    assert not data.mapped


def test_halves_that_look_like_images_are_refused(tmp_path):
    bright = torch.rand(4, 3, 8, 8, generator=rng()).bfloat16()
    path = save(tmp_path / "a.npy", bright)
    assert "values from 0" in refusal(read_array_file, path)
    assert torch.equal(read_array_file(path, floats_as_is=True)[0], bright)
    last = save(tmp_path / "b.npy", bright.movedim(1, 3).contiguous())
    assert "floats are never rearranged" in refusal(read_array_file, last)


@pytest.mark.parametrize("order", ["big-endian", "Fortran"])
def test_other_orders_of_bytes_and_rows_are_put_right(order, tmp_path):
    values = np.float16(np.random.default_rng(0).normal(size=(N, *SHAPE)))
    np.save(
        tmp_path / "a.npy", values.astype(">f2") if order == "big-endian" else values.T.copy().T
    )
    found, _ = read_array_file(tmp_path / "a.npy")
    assert found.is_contiguous()
    np.testing.assert_array_equal(found, values)


def test_latents_in_16_bits_are_those_of_their_images(tmp_path):
    encoded = Latents(Digits(), PCA((1, 4, 4), scale=0.5))
    encoded.setup()
    path = save(tmp_path / "latents.npy", encoded.reference.images.half())
    data = Latents(Digits(), PCA((1, 4, 4), scale=0.5), path=path)
    data.setup()
    assert data.reference.images.dtype == torch.float16
    torch.testing.assert_close(
        data.reference.mean(), encoded.reference.mean(), atol=1e-3, rtol=1e-3
    )
