"""Mean flows: steps and noise of samples in closed form, what the network sees, and files."""

import math

import pytest
import torch
from scipy import special
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.estimators import OneSample
from lit_knn.modules import LitMeanFlow
from lit_knn.nets import UNet
from lit_knn.nets.average_velocity import GAP_FEATURES, AverageVelocity
from lit_knn.sampling import MeanFlowModel
from lit_knn.sampling.building import build
from lit_knn.sampling.samplers import seeded_noise
from tests.watched import Tripled


def test_samples_take_the_steps_asked_for_from_their_seed_noise():
    net, noise = Tripled(), seeded_noise(range(5), (1, 2, 2))
    model = MeanFlowModel(AverageVelocity(net), (1, 2, 2), num_steps=2)
    module = LitMeanFlow(net, OneSample(), sampling_steps=2)
    module.image_shape = (1, 2, 2)
    # Each of m steps multiplies z by 1 − 3/m.
    for num_steps, taken in ((None, 2), (1, 1), (5, 5)):
        for sampler in (model, module):
            expected = (1 - 3 / taken) ** taken * noise
            torch.testing.assert_close(sampler.sample(range(5), num_steps), expected)
    with pytest.raises(InputError, match="num_steps must be at least 1"):
        model.sample([0], 0)
    with pytest.raises(InputError, match="num_steps must be at least 1"):
        MeanFlowModel(AverageVelocity(net), (1, 2, 2), num_steps=0)


def test_a_file_keeps_the_steps_of_a_mean_flow():
    net = UNet(1, channels=8, multipliers=(1,), blocks=1, augment_dim=GAP_FEATURES).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = MeanFlowModel(AverageVelocity(net), (1, 4, 4), num_steps=3)
    loaded = build(model.description(), net.state_dict())
    assert torch.equal(loaded.sample([0, 1]), model.sample([0, 1]))
    assert not torch.allclose(model.sample([0, 1], 1), model.sample([0, 1]))


def test_the_network_sees_the_gap_of_the_times_as_waves():
    net, labels = Tripled(), []
    r, t = torch.tensor([[0.0, 0.1, 0.2, 0.5], [1.0, 0.3, 0.9, 0.5]], dtype=torch.float64)
    net.register_forward_pre_hook(lambda _, args: labels.append(args[3]))
    AverageVelocity(net)(torch.zeros(4, 1, dtype=torch.float64), t, r=r)
    # cos(k·a) is the Chebyshev polynomial T_k of cos(a). The network's π is rounded to float32.
    for k in range(1, 9):
        wave = special.eval_chebyt(k, torch.cos(math.pi * (t - r)).numpy())
        assert labels[0][:, k - 1].numpy() == pytest.approx(wave, abs=1e-5)
