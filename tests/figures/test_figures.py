"""Figures 1, 2 and 5: the numbers that they draw, read back from matplotlib."""

import numpy as np
import torch
from matplotlib.colors import to_hex
from sklearn.datasets import load_digits

from lit_knn.data import Digits
from lit_knn.estimators import KNN, Exact, OneSample
from lit_knn.figures import (
    figure1,
    figure2,
    figure5,
)
from lit_knn.figures.style import PALETTE
from lit_knn.metrics.mean_pictures import mean_pictures
from lit_knn.reference import ReferenceSet
from tests.figures.reading import colour


def test_figure_1_shows_the_posterior_and_the_proposal():
    # Three points have distances 0, 1 and 2 from z and likelihoods 1, e^(-1/2) and e^(-2); one is no neighbour.
    reference = ReferenceSet(torch.tensor([[1.0], [2.0], [3.0]]))
    figure = figure1(KNN(k=2, n=1).bind(reference), reference, 1.0, [1.0, 9.0])
    axes, _ = figure.axes
    likelihood = np.exp([0, -0.5, -2])
    stems = axes.collections[0]
    heights = [segment[1, 1] for segment in stems.get_segments()]
    np.testing.assert_allclose(heights, likelihood / likelihood.sum(), rtol=1e-6)
    assert [segment[0].tolist() for segment in stems.get_segments()] == [[1, 0], [2, 0], [3, 0]]
    near, _, other = (to_hex(shade) for shade in stems.get_colors())
    assert [near, other] == [
        to_hex(handle.get_color()) for handle in figure.legends[0].get_lines()[:2]
    ]
    capped = np.exp([0, -0.5, -0.5])
    dots, latent = axes.lines
    np.testing.assert_allclose(dots.get_ydata(), capped / capped.sum(), rtol=1e-6)
    assert dots.get_xdata().tolist() == [1, 2, 3]
    assert list(latent.get_xdata()) == [1, 1]
    assert axes.get_ylim()[1] > max(*heights, *dots.get_ydata())
    assert f"{capped.sum() / likelihood.sum():.2f}" in axes.get_title()
    assert "$k = 2$" in "".join([axes.get_title(), figure.get_suptitle()])


def test_the_rows_of_figure_2_and_their_places():
    data = Digits()
    data.setup()
    rows = mean_pictures(
        {"exact": Exact(), "source": OneSample()}, data.reference, [0.01, 1e4], num_images=3
    )
    assert list(rows) == ["$z$", "true mean", "exact", "source"]
    assert torch.equal(rows["exact"], rows["true mean"])
    # Without noise the mean is the source of z; with much noise it is the mean of the data.
    torch.testing.assert_close(rows["true mean"][0], rows["source"][0])
    mean = np.rint(load_digits().images * (255 / 16)).mean(0) / 127.5 - 1
    for image in rows["true mean"][1]:
        np.testing.assert_allclose(image[0], mean, atol=1e-3)
    # The picture of z has unit scale at every noise level.
    assert 0.7 < rows["$z$"][1].std() < 1.3
    rows = {
        "a": torch.full((3, 1, 2, 2), -1.0),
        "b": torch.tensor([1.0, 1.0, 0.0]).reshape(3, 1, 1, 1),
    }
    grid = np.array(figure2(rows, [0.25, 2.0, 40.0]).axes).reshape(2, 3)
    assert [axes.get_title() for axes in grid[0]] == ["$t = 0.25$", "$t = 2$", "$t = 40$"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["a", "b"]
    assert [[axes.images[0].get_array()[0, 0, 0] for axes in row] for row in grid] == [
        [0, 0, 0],
        [255, 255, 128],
    ]
    (axes,) = figure2(
        {"a": torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, -1.0]]).expand(1, 1, 2, 3)}, [1.0]
    ).axes
    assert axes.images[0].get_array()[..., 1].tolist() == [[0, 255, 128], [255, 0, 0]]


def test_figure_5_has_distance_and_copies_by_t_switch():
    values = {("KNN", 5.0): (30.0, 0.1), ("forward", 0.1): (2.0, 0.9), ("KNN", 0.1): (3.0, 0.8)}
    values |= {("forward", 5.0): (20.0, 0.2)}
    rows = [
        {"method": method, "t_switch": t, "fid": fid, "copied_fraction": copied}
        for (method, t), (fid, copied) in values.items()
    ]
    left, right = figure5(rows, "fid", "forward").axes
    for place, axes in enumerate((left, right)):
        for line in axes.lines:
            assert list(line.get_xdata()) == [0.1, 5.0]
            assert list(line.get_ydata()) == [
                values[line.get_label(), t][place] for t in (0.1, 5.0)
            ]
    assert [(axes.get_xscale(), axes.get_yscale()) for axes in (left, right)] == [
        ("log", "linear")
    ] * 2
    assert (left.get_ylim()[0], right.get_ylim()[0] < 0 < 1 < right.get_ylim()[1]) == (0, True)
    assert {line.get_label(): line.get_linestyle() for line in left.lines} == {
        "KNN": "-",
        "forward": "--",
    }
    assert (left.get_ylabel(), right.get_ylabel()) == ("FID", "copied fraction")
    assert {line.get_label(): colour(line) for line in right.lines} == {
        "KNN": PALETTE["KNN"][0],
        "forward": "#808080",
    }
