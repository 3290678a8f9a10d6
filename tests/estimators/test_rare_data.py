"""Rare data: floats beyond the codes of 8 bits, tensors of big-endian machines, neighbours that are not there."""

import re

import pytest
import torch

from lit_knn.index import TorchIndex
from lit_knn.metrics import is_copied, nearest_images
from lit_knn.nets.published.edm_pickle import read_edm_pickle
from lit_knn.reference import ReferenceSet
from tests.edm_pickles import network, published, write
from tests.image_files import refusal


@pytest.mark.parametrize("least", [-129, -128, -300, -127])
@pytest.mark.parametrize("most", [128, 127, 400])
def test_floats_on_the_grid_of_pixels_but_beyond_it_do_not_wrap(least, most):
    # Pixel p is the code p − 128, so that float data may have the steps of pixels and codes beyond 8 bits.
    steps = torch.tensor([[least, 0.0], [most, 5.0], [1.0, -3.0]]) + 0.5
    x = steps / 127.5
    sq_dist, found = ReferenceSet(x, TorchIndex("float32")).search(x, 1)
    # Codes of 8 bits are half a step off at most, in each of two dimensions.
    assert sq_dist.max() <= 2 * (x.abs().max() / 127 / 2 * 1.01) ** 2
    assert found[:, 0].tolist() == [0, 1, 2]


def test_tensors_of_a_big_endian_machine_are_refused(tmp_path):
    path = write(tmp_path / "a.pkl", published(network()[0]))
    read_edm_pickle(path)
    content, count = re.subn(rb"(?<=little_endianq.)\x88", b"\x89", path.read_bytes())
    assert count > 1
    path.write_bytes(content)
    assert "holds a tensor in an unknown format" in refusal(read_edm_pickle, path)


class FindsCopies(ReferenceSet):
    """Finds the images 1 and 2 alone."""

    def search(self, z, k):
        ids = torch.tensor([[1, 2, *[-1] * (k - 2)]] * len(z))
        return torch.where(ids < 0, torch.inf, 0.0), ids


def test_a_missing_neighbour_is_not_the_second_nearest():
    # Images 1 and 2 are equal. Image 0, which stands in for a missing neighbour, differs from them.
    x = torch.tensor([[9.0, 9.0], [1.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    found = nearest_images(torch.tensor([[1.0, 2.0]]), FindsCopies(x))
    assert found.distance.tolist() == found.second_distance.tolist() == [2.0]
    assert found.ratio.tolist() == [1.0]
    assert is_copied(found).tolist() == [False]
