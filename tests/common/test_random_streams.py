"""Every random draw has its own key: no seed, rank, stream, batch, level or estimator shares its draws with another."""

import itertools
from collections import deque

import pytest
import torch

from lit_knn.common.rng import (
    Stream,
    keyed_default_rng,
    keyed_generator,
    seed_from_key,
    seeded_from,
)
from lit_knn.estimators import Estimator, OneSample
from lit_knn.metrics import error_curve
from lit_knn.modules import LitEDM, LitICT
from lit_knn.reference import ReferenceSet
from tests.short_training import train
from tests.watched import Images, OneOfSeveral, WatchedNet, undone

BOTH = pytest.mark.parametrize("kind", [LitICT, LitEDM])


def test_every_key_has_a_seed_and_every_stream_a_number():
    keys = [
        key for length in range(1, 5) for key in itertools.product((0, 1, 5, 2**40), repeat=length)
    ]
    assert len({seed_from_key(*key) for key in keys}) == len(keys)
    assert seed_from_key(3, 4) == seed_from_key(3, 4)
    assert all(0 <= seed_from_key(*key) < 2**63 for key in keys)
    # An IntEnum would take a second name for an alias.
    assert len(Stream.__members__) == len(set(Stream)) > 15


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


def test_seeded_blocks_differ_and_repeat_with_their_generator():
    def draws():
        generator, drawn = keyed_generator("cpu", 3), []
        for _ in range(3):
            with seeded_from(generator):
                drawn.append(torch.rand(1).item())
        return drawn

    assert len(set(draws())) == 3
    assert draws() == draws()


def noise_of(kind, seed=0, rank=0):
    """The noise of two training batches and of two validation batches, each of all sixty images."""
    net, data = WatchedNet(), Images(batch_size=60)
    data.train_dataloader = lambda: torch.utils.data.DataLoader(
        torch.cat([data.x, data.x]), batch_size=60
    )
    data.val_dataloader = data.train_dataloader
    model = kind(net, OneSample(), seed=seed)
    train(model, data, 2, strategy=OneOfSeveral(rank, 2), limit_val_batches=2)
    assert model.images_seen == 2 * 2 * 60
    passes = 2 if kind is LitICT else 1  # student and teacher
    return [(z - data.x) / t for z, t in map(undone, net.calls[-4 * passes :: passes])]


@BOTH
def test_batches_of_seeds_ranks_and_streams_share_no_noise(kind):
    noise = [
        batch.flatten()
        for seed, rank in ((0, 0), (0, 1), (1, 0))
        for batch in noise_of(kind, seed, rank)
    ]
    assert len(noise) == 3 * 4
    # A correlation of 960 independent pairs has the standard deviation 0.03.
    assert torch.corrcoef(torch.stack(noise)).fill_diagonal_(0).abs().max() < 0.17


@BOTH
def test_dropout_does_not_draw_from_the_global_generator(kind):
    masks = []
    for seed in (1, 2):
        net = WatchedNet(dropout=0.5)
        torch.manual_seed(seed)
        train(kind(net, OneSample()), Images(), 2)
        masks.append(torch.cat([output != 0 for *_, output in net.calls]))
        assert 0.4 < masks[-1].float().mean() < 0.6
    assert torch.equal(*masks)


class Drawing(Estimator):
    """Returns noise from the generator that it is given, and records the noise."""

    needs_reference = False
    deterministic = False

    def __init__(self):
        self.drawn = deque()  # Copies of the estimator share it.

    def _posterior_mean(self, z, t, x_source, generator):
        if generator is None:  # a trial without measuring
            return z
        self.drawn.append(torch.randn(z.shape, generator=generator, device=z.device))
        return self.drawn[-1].to(z.dtype)


def test_parts_of_an_error_curve_draw_independently():
    reference = ReferenceSet(torch.randn(8, 5, generator=torch.Generator().manual_seed(0)))
    drawn = []
    for seed, names in ((5, "ab"), (6, "a")):
        estimators = {name: Drawing() for name in names}
        error_curve(estimators, reference, [0.5, 2.0], num_z=8, repeats=3, batch_size=4, seed=seed)
        drawn += [noise for estimator in estimators.values() for noise in estimator.drawn]
    assert len(drawn) == 3 * 2 * 2 * 3
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))
