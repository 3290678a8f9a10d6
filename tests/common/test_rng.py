"""Keyed streams of random numbers."""

import itertools

import torch

from lit_knn.common.rng import following, keyed_default_rng, keyed_generator, seed_from_key


def test_every_key_has_a_seed_of_its_own():
    keys = [key for length in range(1, 5) for key in itertools.product((0, 1, 5, 2**40), repeat=length)]
    assert len({seed_from_key(*key) for key in keys}) == len(keys)
    assert seed_from_key(3, 4) == seed_from_key(3, 4)
    assert all(0 <= seed_from_key(*key) < 2**63 for key in keys)


def test_the_default_generator_goes_on_after_a_keyed_block():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    with keyed_default_rng(torch.device("cpu"), 1, 2):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    with keyed_default_rng(torch.device("cpu"), 1, 2):
        assert torch.equal(torch.rand(4), inside)
    assert not torch.equal(inside, expected)


def test_blocks_that_follow_a_generator_draw_other_numbers_and_repeat_with_it():
    def draws():
        generator, drawn = keyed_generator("cpu", 3), []
        for _ in range(3):
            with following(generator):
                drawn.append(torch.rand(1).item())
        return drawn

    first = draws()
    assert len(set(first)) == 3
    assert draws() == first
