"""Data modules: the batches of training, validation and prediction, of one rank and of several, and their options."""

import types

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits

from lit_knn.common.errors import InputError
from lit_knn.data import CIFAR10, Arrays, Digits, ImageFiles, Prepared, ReferenceDataModule
from lit_knn.data.batches import ReferenceBatches
from lit_knn.data.prepared_writer import prepare
from lit_knn.index import FaissIndex
from lit_knn.reference import ReferenceSet
from tests.image_files import write_cifar10

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(ReferenceDataModule):
    """43 vectors; vector i is the number i. They make ten batches of 4 and a rest."""

    loads = 0

    def load(self):
        self.loads += 1
        return np.arange(43, dtype=np.float32)[:, None], np.arange(43)


def numbers_of(batches) -> list[list[int]]:
    return [x.flatten().int().tolist() for x, _ in batches]


def drawn(N: int, batch_size: int, **options) -> list[list[int]]:
    """The batches of a set in which image i is the number i."""
    return numbers_of(
        ReferenceBatches(ReferenceSet(torch.arange(float(N))[:, None]), batch_size, **options)
    )


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


# Batches


def test_each_epoch_has_every_image_once_in_another_order():
    before = torch.get_rng_state()
    epochs = [drawn(40, 8, batches_done=lambda e=e: 5 * e) for e in range(3)]
    assert all(sorted(flat(epoch)) == list(range(40)) for epoch in epochs)
    assert len({tuple(flat(epoch)) for epoch in epochs} | {tuple(range(40))}) == 4
    # An iteration goes on in mid-epoch and into the next.
    stream = [*epochs[0], *epochs[1], *epochs[2]]
    for done in range(10):
        assert drawn(40, 8, batches_done=lambda done=done: done) == stream[done : done + 5]
    # Images left out of an epoch come in others.
    short = [drawn(11, 4, batches_done=lambda e=e: 2 * e) for e in range(20)]
    assert {len(epoch) for epoch in short} == {2}
    assert set(flat(flat(short))) == set(range(11))
    # The last step of an epoch has all its batches.
    assert [len(drawn(43, 4, accumulate=n)) for n in (1, 3, 4, 10)] == [10, 9, 8, 10]
    with pytest.raises(
        InputError,
        match=r"data.batch_size=4 times accumulate_grad_batches=11 on 1 .* needs 44 images",
    ):
        drawn(43, 4, accumulate=11)
    # The seed alone sets the order.
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert drawn(40, 8) == epochs[0] != drawn(40, 8, seed=1)


@pytest.mark.parametrize(("shuffle", "world_size"), [(True, 3), (False, 2)])
def test_ranks_are_disjoint_and_together_draw_what_one_draws(shuffle, world_size):
    ranks = [
        drawn(41, 4, shuffle=shuffle, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    single = drawn(41, 4 * world_size, shuffle=shuffle)
    everything = flat(flat(ranks))
    assert len(set(everything)) == len(everything) == (36 if shuffle else 40)
    assert len({len(rank) for rank in ranks}) == 1
    for per_rank, together in zip(zip(*ranks, strict=True), single, strict=False):
        assert len({len(batch) for batch in per_rank}) == 1
        assert set(flat(per_rank)) <= set(together)
        assert len(together) - len(flat(per_rank)) < world_size


def test_validation_subset_is_fixed_and_not_the_first_images():
    subset = {"shuffle": False, "num_images": 20}
    first = drawn(100, 8, **subset)
    assert [len(batch) for batch in first] == [8, 8, 4]
    assert drawn(100, 8, **subset) == first != drawn(100, 8, **subset, seed=1)
    assert flat(drawn(100, 5, **subset)) == flat(first) != list(range(20))
    assert len(set(flat(first))) == 20
    assert [len(batch) for batch in drawn(11, 8, **subset)] == [8, 3], (
        "all images, if there are fewer"
    )


def test_mirrored_images_are_in_the_epoch_with_their_labels():
    images = torch.arange(6 * 4, dtype=torch.uint8).reshape(6, 1, 1, 4)
    batches = list(
        ReferenceBatches(
            ReferenceSet(images, hflip=True, labels=np.arange(10, 16, dtype=np.int32)), 4
        )
    )
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert (x.dtype, labels.dtype) == (torch.float32, torch.int64)
    levels = ((x + 1) * 127.5).round().int()
    expected = torch.cat([images, images.flip(-1)]).int()
    assert sorted(levels.flatten(1).tolist()) == sorted(expected.flatten(1).tolist())
    assert torch.equal(levels.amin((1, 2, 3)), 4 * (labels - 10).int())


# Runs


def test_overfitting_repeats_the_same_batches():
    data = Numbers(batch_size=4)
    data.setup()
    data.trainer = pl.Trainer(
        overfit_batches=2, logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    first, second = (numbers_of(data.train_dataloader()) for _ in range(2))
    assert first == second


def test_ranks_share_seeds_and_validation_images():
    ranks = [Numbers(batch_size=2, predict_samples=10, val_images=9) for _ in range(3)]
    for rank, data in enumerate(ranks):
        data.setup()
        data.trainer = types.SimpleNamespace(global_rank=rank, world_size=3)
    seeds = [torch.cat(list(data.predict_dataloader())).tolist() for data in ranks]
    assert seeds == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    validated = flat([flat(numbers_of(data.val_dataloader())) for data in ranks])
    assert len(validated) == len(set(validated)) == 9


# Data sets


def test_digits_span_the_pixel_range_in_17_steps():
    images, labels = Digits().load()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), np.uint8)
    assert (images.min(), images.max()) == (0, 255)
    # Each value of 0 to 16 is the nearest pixel.
    assert np.abs(images[:, 0] * (16 / 255) - load_digits().images).max() < 0.5 * 16 / 255
    np.testing.assert_array_equal(labels, load_digits().target)
    data = Digits(hflip=True)
    data.setup()
    assert data.reference.N == 2 * 1797


def test_cifar10_is_read_from_its_folder_and_prepared(tmp_path, monkeypatch):
    data = CIFAR10(root=str(tmp_path), download=False)
    data.prepare_data()
    with pytest.raises(InputError, match=r"data\.root=.*data\.download"):
        data.setup("fit")
    expected = write_cifar10(tmp_path, monkeypatch)
    prepare(tmp_path, tmp_path / "x.npy")
    for images, labels in (data.load(), Prepared(str(tmp_path / "x.npy")).load()):
        np.testing.assert_array_equal(images, expected)
        assert labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.class_names == list("abcdefghij")


# Options


def images_of(reference) -> list[int]:
    return reference.images[:, 0].int().tolist()


def test_setup_loads_once_and_hands_on_index_and_seed():
    index = FaissIndex("SQ8")
    data = Numbers(index=index, batch_size=4)
    data.setup("fit")
    reference = data.reference
    data.setup("validate")
    assert (data.reference, data.loads, reference.index) == (reference, 1, index)
    batches = {}
    for seed in (0, 1):
        data = Numbers(batch_size=40, seed=seed)
        data.setup()
        (batches[seed],) = numbers_of(data.train_dataloader())
    assert batches[0] != batches[1]


def test_held_out_images_are_in_no_reference_set_or_batch():
    data = Numbers(batch_size=11, held_out=10, index=FaissIndex())
    data.setup("fit")
    held_out, training = images_of(data.held_out_reference), images_of(data.reference)
    assert (len(held_out), len(training)) == (10, 33)
    assert sorted(held_out + training) == list(range(43))
    assert (sorted(held_out), sorted(training)) == (held_out, training), (
        "both keep the order of the data"
    )
    assert held_out == data.held_out_reference.labels.tolist(), "labels stay with their images"
    for batches, expected in (
        (data.train_dataloader(), training),
        (data.val_dataloader(), held_out),
    ):
        assert sorted(label for _, labels in batches for label in labels.tolist()) == expected
    # The index and the fingerprint are those of the part.
    whole, z = Numbers(), data.held_out_reference.images
    whole.setup()
    assert whole.held_out_reference is None
    assert whole.reference.fingerprint() != data.reference.fingerprint()
    assert data.held_out_reference.search(z, 1)[0].max() == 0
    assert data.reference.search(z, 1)[0].min() >= 1


def test_train_images_are_nested_draws_without_held_out_images():
    sets = [
        Numbers(held_out=10, train_images=count, seed=seed)
        for count, seed in ((5, 0), (20, 0), (None, 1))
    ]
    for data in sets:
        data.setup()
    few, more, all_of_them = (set(images_of(data.reference)) for data in sets)
    assert (len(few), len(more), len(all_of_them)) == (5, 20, 33)
    assert few < more < all_of_them, "experiments over N add images"
    held_out = [images_of(data.held_out_reference) for data in sets]
    assert held_out[0] == held_out[1] == held_out[2], "networks of all seeds compare"


@pytest.mark.parametrize("labels", [np.eye(43), np.arange(43) - 1, torch.rand(43), np.arange(42)])
def test_labels_that_are_no_classes_are_left_out_unless_used(labels, capsys):
    images = torch.zeros(43, 1)
    data = Loaded((images, labels))
    data.setup()
    assert data.reference.labels is None
    assert "labels must be" in capsys.readouterr().err
    data = Loaded((images, labels))
    data.trainer = types.SimpleNamespace(lightning_module=types.SimpleNamespace(conditioning=True))
    with pytest.raises(InputError, match="Loaded: labels must be"):
        data.setup()


class Loaded(Numbers):
    """Data whose `load` returns something else."""

    def __init__(self, loaded):
        super().__init__()
        self.load = lambda: loaded


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Numbers(held_out=43), "data.held_out=43 needs at least 44 images, there are 43"),
        (
            lambda: Numbers(held_out=10, train_images=34),
            "data.held_out=10 and data.train_images=34 needs at least 44",
        ),
        (lambda: Numbers(batch_size=0), "data.batch_size must be at least 1, got 0"),
        (lambda: Numbers(batch_size=44), "data.batch_size=44"),
        (lambda: Numbers(train_images=0), "data.train_images must be at least 1, got 0"),
        (lambda: ImageFiles("absent.zip"), "data.path=absent.zip: absent.zip does not exist"),
        (lambda: Arrays("absent.npy"), "data.path=absent.npy: absent.npy does not exist"),
    ],
)
def test_options_that_cannot_be_are_refused_before_training(make, told):
    with pytest.raises(InputError, match=told.replace(".", r"\.")):
        make().setup("fit")
