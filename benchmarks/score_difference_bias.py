"""Measures where the score difference moves images that are right already, by the number of images behind each mean.

    python -m benchmarks.score_difference_bias --set cifar16 --kept cifar16.npz --output rows.csv

A perfect generator makes new images. So images that no run trains on stand for its samples: most of them are the bank,
and the others are moved by V = E_data[x|z, t] − E_samples[x|z, t]. A right V would be 0 on average. `contrast` is the
part of V along the deviations of an image from its own mean, divided by the squares of these deviations: to first
order, the growth of the image's standard deviation in one step of length 1. Standard errors are over the moved
images, with one bank.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import add_rows
from benchmarks.learning_curves.grid import BANK_SIZE, targets
from benchmarks.learning_curves.sets import cifar
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.common.rng import keyed_generator
from lit_knn.common.tables import Row
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.score_difference import score_difference

# The ends of the levels of the score difference, and what is between.
LEVELS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# Noises of each image and level.
REPEATED = 8


def main() -> None:
    """Measure the difference of each pair of means at each level, and add the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("cifar16", "cifar32"), default="cifar16")
    parser.add_argument("--kept", type=Path, required=True, help="the images, see learning_curves")
    parser.add_argument("--output", type=Path, required=True, help="the rows, a .csv file")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with errors_in_one_line():
        images = cifar(args.set, None, args.kept).images()
        assert images.held_out is not None
        new_images = images.held_out.take(torch.arange(images.held_out.N))
        add_rows(args.output, lambda: measure(args.set, images.training, new_images))


def measure(name: str, data: ReferenceSet, new_images: Tensor) -> list[Row]:
    """Return a row for each pair of means and each level.

    Args:
        name: the set, which decides what the pairs are.
        data: the training images.
        new_images: (M, *shape), more than the bank has samples.
    """
    bank, moved = ReferenceSet(new_images[:BANK_SIZE]), new_images[BANK_SIZE:]
    rows: list[Row] = []
    for means, plug_ins in targets(name, "score difference").items():
        parts = plug_ins()
        attraction, repulsion = parts["estimator"].bind(data), parts["repulsion"].bind(bank)
        for number, t in enumerate(LEVELS):
            moves = moves_at(moved, t, attraction, repulsion, seed=number)
            about: Row = {"set": name, "means": means, "t": t, "images": len(moved)}
            about |= {"rms": moves.square().mean().sqrt().item()}
            rows.append(about | contrast_growth(moved, moves))
    return rows


def moves_at(x: Tensor, t: float, attraction: Estimator, repulsion: Estimator, seed: int) -> Tensor:
    """Return V of the images x (M, *shape) at the level t, the mean over `REPEATED` noises: (M, *shape)."""
    draws = keyed_generator("cpu", seed)
    levels = torch.full((len(x),), t, dtype=torch.float64)

    def moves_of_one_noise() -> Tensor:
        noise = torch.randn(x.shape, generator=draws)
        return score_difference(
            x,
            levels,
            noise,
            partial(attraction.posterior_mean, generator=draws),
            partial(repulsion.posterior_mean, generator=draws),
        )

    return torch.stack([moves_of_one_noise() for _ in range(REPEATED)]).mean(0)


def contrast_growth(x: Tensor, moves: Tensor) -> Row:
    """Return the part of `moves` along the deviations of images x, both (M, *shape), and its standard error."""
    values = x.flatten(1)
    deviations = values - values.mean(1, keepdim=True)
    along, squares = (moves.flatten(1) * deviations).sum(1), deviations.square().sum(1)
    contrast = along.sum() / squares.sum()
    # The error of a ratio of means, to first order.
    residuals = (along - contrast * squares) / squares.mean()
    error = residuals.std() / len(x) ** 0.5
    return {"contrast": contrast.item(), "contrast_se": error.item()}


if __name__ == "__main__":
    main()
