"""Parts of a prepared file: they are those of the same images in memory, and views of the file on every rank."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lit_knn.commands.probe import draw_latents
from lit_knn.data import Arrays, Prepared
from lit_knn.data.image_files import read_image_files
from lit_knn.data.prepared_writer import prepare
from lit_knn.estimators import KNN, ByClass, Exact
from lit_knn.index import FaissIndex, SubspaceIndex
from lit_knn.reference.classes import classes_of
from lit_knn.reference.row_view import RowView
from tests.image_files import image_folder

PARTS = [
    {"held_out": 7},
    {"train_images": 9},
    {"held_out": 7, "train_images": 9},
    {"held_out": 7, "hflip": True},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40 images as a prepared file, and the same in an .npz file."""
    folder = tmp_path_factory.mktemp("parts")
    prepare(image_folder(folder / "source", 40, (4, 4)), folder / "x.npy")
    images, labels, _ = read_image_files(folder / "source")
    np.savez(folder / "x.npz", images=images, labels=labels)
    return str(folder / "x.npy"), str(folder / "x.npz")


def set_up(data):
    data.setup()
    return data


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_parts_are_those_of_the_images_in_memory(files, options):
    mapped, loaded = (
        set_up(kind(path, batch_size=4, **options))
        for kind, path in zip((Prepared, Arrays), files, strict=True)
    )
    for name in ("reference", "held_out_reference"):
        view, copy = getattr(mapped, name), getattr(loaded, name)
        assert (view is None) == (copy is None)
        if copy is not None:
            assert view.images.images is mapped.reference.images.images, (
                "both parts are views of one mapping"
            )
            ids = torch.arange(copy.N)
            assert torch.equal(view.gather(ids), copy.gather(ids))
            assert torch.equal(view.labels, copy.labels)
    for of_view, of_copy in (
        (mapped.train_dataloader(), loaded.train_dataloader()),
        (mapped.val_dataloader(), loaded.val_dataloader()),
    ):
        assert all(torch.equal(x, y) for (x, _), (y, _) in zip(of_view, of_copy, strict=True))


@pytest.mark.parametrize(
    "index", [lambda: None, lambda: FaissIndex("Flat"), lambda: SubspaceIndex(r=8)]
)
def test_estimators_find_the_same_in_a_view(files, index):
    z = 0.5 * torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0.1, 2, 6)
    view, copy = (
        set_up(kind(path, held_out=7, index=index())).reference
        for kind, path in zip((Prepared, Arrays), files, strict=True)
    )
    for make, labels in (
        (Exact, None),
        (lambda: KNN(k=12, n=8), None),
        (lambda: ByClass(Exact()), torch.arange(6) % 4),
    ):
        means = [
            make()
            .bind(part)
            .posterior_mean(z, t, labels=labels, generator=torch.Generator().manual_seed(1))
            for part in (view, copy)
        ]
        assert torch.equal(*means)


def test_parts_have_fingerprints_of_their_own(files):
    prints = set()
    for options in ({}, *PARTS, {"held_out": 8}):
        data = set_up(Prepared(files[0], **options))
        sets = [part for part in (data.reference, data.held_out_reference) if part is not None]
        prints |= {part.fingerprint() for part in sets}
        assert (
            set_up(Prepared(files[0], **options)).reference.fingerprint()
            == data.reference.fingerprint()
        )
    # The held-out images do not depend on the number to train on.
    assert len(prints) == 1 + 2 + 1 + 1 + 2 + 2


def test_classes_of_a_view_are_views(files):
    whole = set_up(Prepared(files[0], held_out=7)).reference
    for label, part in classes_of(whole).items():
        assert isinstance(part.images, RowView)
        rows = (whole.labels == label).nonzero()[:, 0]
        assert torch.equal(part.gather(torch.arange(part.N)), whole.gather(rows))


@pytest.mark.parametrize("options", [{}, {"train_images": 30}], ids=str)
def test_a_probe_holds_out_images_of_a_file_as_of_memory(files, options):
    of_file = draw_latents(Prepared(files[0], **options), 0.2, 5, torch.device("cpu"))
    of_memory = draw_latents(Arrays(files[1], **options), 0.2, 5, torch.device("cpu"))
    assert len(of_file) == len(of_memory) == 2

    for view, copy in zip(of_file, of_memory, strict=True):
        assert isinstance(view.reference.images, RowView)
        assert torch.equal(view.batch(range(5), 1.0)[0], copy.batch(range(5), 1.0)[0])
    first, second = (part.reference.images.rows.tolist() for part in of_file)
    assert len(second) == 8 - 2 * len(options)
    assert not {*first} & {*second}


def test_ranks_share_the_parts_of_a_file(files):
    whole = set_up(Prepared(files[0], held_out=7))
    shards = []
    for rank in range(3):
        data = Prepared(files[0], held_out=7, sharded=True)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=3)
        with patch("lit_knn.data.base.rank_and_size", lambda rank=rank: (rank, 3)):
            data.setup()
        shards.append(data.reference.local)
        assert torch.equal(data.held_out_reference.images[:], whole.held_out_reference.images[:])
    assert all(isinstance(shard.images, RowView) for shard in shards)
    assert torch.equal(torch.cat([shard.images[:] for shard in shards]), whole.reference.images[:])
    assert torch.equal(torch.cat([shard.labels for shard in shards]), whole.reference.labels)
    assert len({shard.fingerprint() for shard in shards}) == 3


def test_a_view_moves_to_another_device_in_pieces(files, monkeypatch):
    monkeypatch.setattr("lit_knn.reference.row_view.PIECE_BYTES", 5 * 48)
    view = set_up(Prepared(files[0], held_out=7)).reference.images
    assert view.to(torch.device("cpu")) is view
    view.device = torch.device("meta")  # As if the images were elsewhere, so that they are copied.
    assert torch.equal(view.to(torch.device("cpu")), view[:])
