"""Averages of weights: buffers and counts, the order of lengths, and what a snapshot rounds."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lit_knn.callbacks import PowerAverages
from lit_knn.commands.average import average
from lit_knn.common.errors import InputError
from lit_knn.modules.averaging import MovingAverage
from lit_knn.modules.power_averages import TrackedAverages
from tests.interrupted_runs import edm, fit

CPU = torch.device("cpu")


def test_buffers_are_averaged_and_counts_are_copied():
    net = nn.BatchNorm1d(2)
    average = MovingAverage(net, CPU, lambda: 0.75)
    for value in (1.0, 2.0, 4.0):
        for tensor in (net.weight, net.running_mean):
            tensor.data.fill_(value)
        net.num_batches_tracked.fill_(10 * int(value))
        average.update_parameters(net)
    # The first update copies: 1, then 0.75·1 + 0.25·2, then 0.75·1.25 + 0.25·4.
    for tensor in (average.module.weight, average.module.running_mean):
        assert tensor.tolist() == [1.9375, 1.9375]
    assert average.module.num_batches_tracked.item() == 40


def test_complex_weights_are_averaged_like_real_ones():
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    averaged = MovingAverage(net, CPU, lambda: 0.75)
    tracked = TrackedAverages(net, CPU, [0.1])
    snapshots = []
    for images, value in ((40, 1 + 2j), (80, 2 + 4j), (120, 4 + 8j)):
        net.weight.data.fill_(value)
        averaged.update_parameters(net)
        tracked.update(net, images - 40, images)
        snapshots.append({"averages": copy.deepcopy(tracked.weights())})
    assert averaged.module.weight.tolist() == [1.9375 + 3.875j] * 2
    (short,) = tracked.weights()
    assert 2 < short["weight"][0].real < 4
    half = average(snapshots[-2:], np.array([0.5, 0.5]))["weight"]
    parts = [each["averages"][0]["weight"] for each in snapshots[-2:]]
    torch.testing.assert_close(half, (parts[0] + parts[1]) / 2)


def test_averages_of_a_checkpoint_keep_their_order_of_lengths():
    net = nn.Linear(1, 1, bias=False)
    saved = TrackedAverages(net, CPU, [0.05, 0.2])
    for before, now in ((0, 40), (40, 80)):
        net.weight.data.fill_(now)
        saved.update(net, before, now)
    loaded = TrackedAverages(net, CPU, [0.05, 0.2])
    loaded.load_state_dict(saved.state_dict())
    short, long = (average["weight"].item() for average in saved.weights())
    # The shorter average holds more of the last weights.
    assert 40 < long < short < 80
    assert [average["weight"].item() for average in loaded.weights()] == [short, long]
    for other in ([0.2, 0.05], [0.05]):
        with pytest.raises(InputError, match=r"has averages of the lengths \[0\.05, 0\.2\]"):
            TrackedAverages(net, CPU, other).load_state_dict(saved.state_dict())


def test_a_snapshot_rounds_float32_alone_and_is_finite(tmp_path):
    def snapshots_with(name, value):
        model = edm()
        model.register_buffer("large", value)
        half = PowerAverages([0.1], dtype="float16")
        fit(tmp_path / name, model, 1, callbacks=[half])
        paths = (tmp_path / name / "run" / "snapshots").iterdir()
        return [torch.load(path, weights_only=True) for path in paths]

    large = torch.tensor(1e6, dtype=torch.float64)
    (snapshot,) = snapshots_with("wide", large)
    (average,) = snapshot["averages"]
    assert torch.equal(average.pop("large"), large)
    assert {value.dtype for value in average.values()} == {torch.float16}
    # 1e6 is beyond the range of float16.
    with pytest.warns(UserWarning, match="not finite in float16; no snapshot is written"):
        assert snapshots_with("narrow", large.float()) == []
