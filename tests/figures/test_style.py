"""The common style of figures, and grids of images."""

import io

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lit_knn.figures import (
    captioned,
    image_grid,
)
from lit_knn.figures.image_grid import pair_grid
from lit_knn.figures.style import PALETTE, dress, looks


def test_variants_are_lighter_and_the_first_is_on_top():
    names = [
        "KNN, k=8",
        "my own",
        "KNN",
        "authors' KNNDenoiser",
        "another",
        "SubspaceKNN",
        "single Monte_Carlo",
    ]
    found = looks(names)
    colours = {name: to_rgb(look["color"]) for name, look in found.items()}
    assert sum(colours["KNN"]) < sum(colours["KNN, k=8"]) < sum(colours["authors' KNNDenoiser"])
    assert colours["KNN"] == to_rgb(PALETTE["KNN"][0])
    assert colours["single Monte_Carlo"] == to_rgb(PALETTE["MonteCarlo"][0])
    assert len(set(colours.values())) == len(names)
    assert sorted(names, key=lambda name: -found[name]["zorder"]) == names
    unknown = looks(f"network {number}" for number in "abcdefgh").values()
    assert len({(look["color"], look.get("linestyle")) for look in unknown}) == 8
    # They get lighter in the order that is given.
    names = ["KNN k=64", "KNN k=256", "KNN k=1024"]
    found = looks(names)
    shades = [sum(to_rgb(found[name]["color"])) for name in names]
    assert shades == sorted(shades)
    assert to_rgb(looks(["Exact above KNN"])["Exact above KNN"]["color"]) == to_rgb(
        PALETTE["Exact"][0]
    )


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.31, 0.46, ["0.32", "0.34", "0.36", "0.38", "0.4", "0.42", "0.44", "0.46"]),
        (0.5, 8, ["0.6", "1", "2", "3", "4", "6"]),
        (1, 1e6, [rf"$\mathdefault{{10^{{{power}}}}}$" for power in range(7)]),
    ],
    ids=str,
)
def test_log_axis_numbers_differ_and_are_plain_if_short(low, high, wanted):
    figure = Figure()
    axes = figure.subplots()
    dress(axes, "y", ylim=(low, high))
    figure.savefig(io.BytesIO())
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = sorted(
        (tick.get_loc(), tick.label1.get_text()) for tick in ticks if low <= tick.get_loc() <= high
    )
    assert [text for _, text in shown if text] == wanted


def test_grids_show_black_as_0_white_as_1_and_pairs_stacked():
    levels = torch.tensor([-1.0, 1.0, 0.0, 0.5]).reshape(4, 1, 1, 1).expand(-1, 1, 20, 20)
    # People can see small images: a side has at least 32 pixels, and so these are twice as large.
    grid = image_grid(levels)[0, 10::42, 10::42]
    assert grid.flatten().tolist() == pytest.approx([0, 1, 128 / 255, 191 / 255])
    # Nine pairs fill a row of eight and begin a second one; the shades say which image is where.
    upper, under = (
        torch.linspace(low, low + 0.8, 9).reshape(9, 1, 1, 1).expand(9, 1, 32, 32)
        for low in (-0.9, 0.1)
    )
    shades = pair_grid(upper, under)[0, 17::34, 17::34] * 2 - 1
    expected = torch.ones(4, 8)  # Free places are white.
    expected[0], expected[1] = upper[:8, 0, 0, 0], under[:8, 0, 0, 0]
    expected[2, 0], expected[3, 0] = upper[8, 0, 0, 0], under[8, 0, 0, 0]
    # a step of 8-bit pixels
    torch.testing.assert_close(shades[:4, :8], expected, atol=1 / 127, rtol=0)


def test_a_caption_is_dark_text_below_the_unchanged_picture():
    picture = torch.rand(3, 20, 30)
    written = captioned(picture, "a longer line than the picture")
    assert torch.equal(written[:, :20, :30], picture)
    beside, below = written[:, :20, 30:], written[:, 20:]
    assert beside.numel() > 0
    assert (beside == 1).all()
    assert below.min() < 0.1
    assert (below[:, -2:] == 1).all()
