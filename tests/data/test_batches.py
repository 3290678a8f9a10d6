import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.data.batches import ReferenceBatches
from lit_knn.reference import ReferenceSet


def numbered(N: int, **options) -> ReferenceSet:
    """A reference set in which image i is the number i."""
    return ReferenceSet(torch.arange(N, dtype=torch.float32)[:, None], **options)


def ids(batches) -> list[list[int]]:
    return [x.flatten().int().tolist() for x, _ in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_each_epoch_has_every_image_once_in_another_order():
    stream = []
    for e in range(3):
        stream += ids(ReferenceBatches(numbered(40), 8, batches_done=lambda e=e: 5 * e))
    epochs = [flat(stream[start : start + 5]) for start in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(40))]}) == 4
    # An iteration goes on in mid-epoch and into the next.
    for done in range(10):
        assert ids(ReferenceBatches(numbered(40), 8, batches_done=lambda done=done: done)) == stream[done : done + 5]
    # Images left out of an epoch come in others.
    batches = ReferenceBatches(numbered(11), 4)
    assert len(batches) == len(ids(batches)) == 2
    drawn = [flat(ids(ReferenceBatches(numbered(11), 4, batches_done=lambda e=e: 2 * e))) for e in range(20)]
    assert set(flat(drawn)) == set(range(11))


def test_batches_depend_on_the_seed_alone():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = ids(ReferenceBatches(numbered(40), 8, seed=3))
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    before = torch.get_rng_state()
    assert ids(ReferenceBatches(numbered(40), 8, seed=3)) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert ids(ReferenceBatches(numbered(40), 8, seed=4)) != first


@pytest.mark.parametrize(("shuffle", "world_size"), [(True, 2), (True, 3), (False, 2)])
def test_ranks_are_disjoint_and_draw_together_what_one_rank_draws(shuffle, world_size):
    reference = numbered(41)
    ranks = [
        ids(ReferenceBatches(reference, 4, shuffle=shuffle, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    single = ids(ReferenceBatches(reference, 4 * world_size, shuffle=shuffle))
    drawn = flat([i for rank in ranks for i in rank])
    assert len(set(drawn)) == len(drawn)
    assert len({len(rank) for rank in ranks}) == 1
    for per_rank, together in zip(zip(*ranks, strict=True), single, strict=False):
        assert len({len(batch) for batch in per_rank}) == 1
        assert set(flat(per_rank)) <= set(together)
        assert len(together) - len(flat(per_rank)) < world_size
    assert len(drawn) == (40 // (4 * world_size) * 4 * world_size if shuffle else 41 - 41 % world_size)


def test_the_validation_subset_is_the_same_every_time_and_not_the_first_images():
    reference = numbered(100)
    batches = ReferenceBatches(reference, 8, shuffle=False, num_images=20)
    first = ids(batches)
    assert [len(batch) for batch in first] == [8, 8, 4]
    assert len(batches) == 3
    assert ids(batches) == first
    assert len(set(flat(first))) == 20
    assert flat(first) != list(range(20))
    assert flat(ids(ReferenceBatches(reference, 5, shuffle=False, num_images=20))) == flat(first)
    assert ids(ReferenceBatches(reference, 8, shuffle=False, num_images=20, seed=1)) != first


def test_mirrored_images_are_part_of_the_epoch_with_their_labels():
    images = torch.arange(6 * 4, dtype=torch.float32).reshape(6, 1, 1, 4)
    batches = ReferenceBatches(ReferenceSet(images, hflip=True, labels=torch.arange(10, 16)), 4)
    x = torch.cat([x for x, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    expected = torch.cat([images, images.flip(-1)])
    assert {tuple(row) for row in x.flatten(1).tolist()} == {tuple(row) for row in expected.flatten(1).tolist()}
    assert len(x) == 12
    assert torch.equal(x.amin((1, 2, 3)), 4.0 * (labels - 10))


def test_images_come_in_model_space_and_labels_as_int64():
    images = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)
    x, labels = next(iter(ReferenceBatches(ReferenceSet(images, labels=np.array([0, 1], np.int32)), 2)))
    assert x.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.equal(x[:, 0, 0, 0], 2.0 * labels - 1)
    x, labels = next(iter(ReferenceBatches(numbered(2), 2)))
    assert labels is None


@pytest.mark.parametrize(("batch_size", "world_size"), [(11, 1), (6, 2)])
def test_batch_sizes_that_cannot_be_filled_are_refused(batch_size, world_size):
    with pytest.raises(InputError, match=rf"data\.batch_size.*{batch_size}"):
        ReferenceBatches(numbered(10), batch_size, world_size=world_size)
