"""Detects copies of training images by the ratio of the two nearest distances."""

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.common.exchange import Exchange
from lit_knn.index import FaissIndex
from lit_knn.metrics import is_copied, memorisation, nearest_images
from lit_knn.metrics.memorisation import LikestPairs, check_search
from lit_knn.reference import ReferenceSet
from tests.image_files import refusal

# Corners of a square of side 6 in two dimensions; the distances are easy to compute by hand.
SQUARE = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0], [6.0, 6.0]])


def test_distances_and_ratio_on_a_square():
    # Points on an edge have distances 1 and 5, 1.5 and 4.5 (ratio 1/3), 3 and 3 to its corners.
    samples = torch.tensor([[1.0, 0.0], [0.0, 4.5], [6.0, 3.0], [6.0, 6.0]])
    found = nearest_images(samples, ReferenceSet(SQUARE))
    assert found.distance.tolist() == pytest.approx([1, 1.5, 3, 0])
    assert found.second_distance.tolist() == pytest.approx([5, 4.5, 3, 6])
    assert found.ids.tolist()[:2] == [0, 2]
    assert found.ids[3] == 3
    assert found.ratio.tolist() == pytest.approx([1 / 5, 1 / 3, 1, 0])
    # The ratio uses distances, not their squares; a ratio equal to the threshold is not a copy.
    assert is_copied(found).tolist() == [True, False, False, True]
    assert is_copied(found, 0.34).tolist() == [True, True, False, True]
    assert is_copied(found, 0.1).tolist() == [False, False, False, True]
    with pytest.raises(InputError, match="threshold must be above 0 and at most 1, got 2"):
        memorisation(samples, ReferenceSet(SQUARE), 2)
    measured = memorisation(samples, ReferenceSet(SQUARE), 0.34, batch_size=3)
    assert measured == pytest.approx({"copied_fraction": 3 / 4, "mean_nearest_distance": 5.5 / 4})


def test_image_twice_in_the_set_counts_as_copied():
    samples = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    found = nearest_images(samples, ReferenceSet(torch.cat([SQUARE, SQUARE[:1]])))
    assert found.second_distance.tolist() == pytest.approx([6, 5])
    assert is_copied(found).all()
    # If all images are equal there is no second image: the ratio is 1, and nothing is a copy.
    found = nearest_images(samples, ReferenceSet(torch.zeros(5, 2)))
    assert found.ratio.tolist() == [1, 1]
    assert not is_copied(found).any()


def test_a_mirrored_image_is_an_image_of_the_set():
    images = torch.randint(0, 256, (20, 1, 4, 4), dtype=torch.uint8)
    symmetric = torch.cat([images[:1, ..., :2], images[:1, ..., :2].flip(-1)], -1)
    reference = ReferenceSet(torch.cat([images, symmetric]), hflip=True)
    found = nearest_images(reference.gather(torch.tensor([3, 20])).flip(-1), reference)
    assert found.distance.tolist() == [0, 0]
    # The mirror of image 3 has its own id. The symmetric image is its own mirror, and still has a second neighbour.
    assert found.ids.tolist()[0] == 21 + 3
    assert is_copied(found).all()


def test_distances_are_exact_where_those_of_the_search_are_not():
    images = torch.randn(300, 16)
    found = nearest_images(images[:50] + 1e-3, ReferenceSet(images, index=FaissIndex("SQ8")))
    assert found.ids.tolist() == list(range(50))
    assert found.distance.tolist() == pytest.approx([4e-3] * 50, rel=1e-3)
    # Beside a far image, all others have one code, so the search gives them in any order.
    images = torch.cat([images[:7], torch.full((1, 16), 1e4)])
    assert nearest_images(
        images, ReferenceSet(images, index=FaissIndex("SQ8"))
    ).ids.tolist() == list(range(8))


def test_a_set_of_one_image_tells_no_copies():
    assert "the set has one image" in refusal(check_search, ReferenceSet(torch.zeros(1, 4)))


def test_likest_pairs_come_first_and_missing_ones_are_empty():
    reference = ReferenceSet(torch.eye(6))
    samples = torch.eye(6) * torch.tensor([0.9, 0.5, 1.0, 0.6, 0.8, 0.7])[:, None]
    likest = LikestPairs(4, reference)
    for part, expected in ((samples[:2], [0, 1]), (samples[2:], [2, 0, 4, 5])):
        likest.update(part, nearest_images(part, reference))
        found, ids = likest.compute()
        assert ids.tolist() == expected
        assert torch.equal(found, samples[expected])
    # A sample as near to two images is no likely copy, but a sample all the same.
    between = LikestPairs(2, ReferenceSet(SQUARE))
    between.update(
        middle := torch.tensor([[3.0, 0.0]]), nearest_images(middle, ReferenceSet(SQUARE))
    )
    assert torch.equal(between.compute()[0], middle)


def test_likest_pairs_are_those_of_all_ranks(monkeypatch):
    reference = ReferenceSet(torch.eye(6))
    samples = torch.eye(6) * torch.linspace(0.5, 1, 6)[:, None]
    ranks = [LikestPairs(2, reference) for _ in range(2)]
    for rank, part in zip(ranks, samples.split(3), strict=True):
        rank.update(part, nearest_images(part, reference))
    gathered = zip(*(rank._parts for rank in ranks), strict=True)
    monkeypatch.setattr(Exchange, "all_gather", lambda self, rows: list(next(gathered)))
    assert ranks[0].compute()[1].tolist() == [5, 4]
