"""Measures the error of the exact mean by products of digits, as a GPU computes it, at each noise level.

    python -m benchmarks.split_products --data PATH [--t 0.2 0.5 ...] [--latents 64] [--cut 16] [--output STEM]

The table has the mean squared error per dimension against the mean in float64 (`ExactFloat64`), ± its standard error
over latents made from the images. It needs no GPU: a CPU computes the same products of the same digits. Its float32
sums round every addition. The matrix units of GPUs cut off the last bits after every few terms. The columns "cut off"
emulate this for the first `--cut` latents: after every 16 terms the sum is rounded towards zero. They compare sums in
the blocks that `BFloat16Products` takes with sums of 8,192 terms. `--output` also writes STEM.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Output, cell, load, markdown
from lit_knn.errors import told_in_one_line
from lit_knn.estimators.digit_sums import digit_sums
from lit_knn.estimators.float_sums import float_sums
from lit_knn.linalg.dtypes import is_native
from lit_knn.linalg.split import TERMS_PER_SUM, BFloat16Products, Int8Products, Products
from lit_knn.metrics.estimator_error import mean_and_error
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator
from lit_knn.theory.noise import forward_noise

LEVELS = [0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 20, 40, 80]
# Number of terms that one instruction of a matrix unit adds to a sum.
TERMS_PER_INSTRUCTION = 16
# Number of images whose weighted sum is one product on a CPU.
LONGEST_SUM = 8192


class CutOffProducts(BFloat16Products):
    """Products in bfloat16 whose float32 sums lose their last bits, as in the matrix units of NVIDIA's GPUs.

    Args:
        digits: number of digits of a latent.
        terms: number of terms of one such sum; float32 additions, which round, join them.
    """

    def __init__(self, digits: int, terms: int) -> None:
        super().__init__(digits)
        self.terms = terms

    def multiply(self, digits: Tensor, matrix: Tensor) -> Tensor:
        """See `Products.multiply`."""
        count, batch, _ = digits.shape
        blocks = zip(digits.flatten(0, 1).split(self.terms, 1), matrix.split(self.terms), strict=True)
        total = torch.stack([cut_off_product(a.float(), b.float()) for a, b in blocks]).sum(0)
        return total.view(count, batch, -1).sum(0)


def cut_off_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, float32, where each sum is rounded towards zero after a few terms."""
    total = torch.zeros(len(a), b.shape[1])
    for part, matrix in zip(a.split(TERMS_PER_INSTRUCTION, 1), b.split(TERMS_PER_INSTRUCTION), strict=True):
        # float64 holds these few products and their sum to more bits than float32.
        wide = (part @ matrix).double().add_(total)
        total = wide.float()
        farther = total.abs() > wide.abs()
        total = torch.where(farther, torch.nextafter(total, torch.zeros(())), total)
    return total


def measured_products() -> dict[str, Products]:
    """Return the measured products by name."""
    found: dict[str, Products] = {f"bfloat16, {count} digits": BFloat16Products(count) for count in (2, 3)}
    if is_native(torch.int8, torch.device("cpu")):
        found |= {f"int8, {count} digits": Int8Products(count) for count in (2, 3)}
    blocks = {f"{TERMS_PER_SUM:,}": TERMS_PER_SUM, f"{LONGEST_SUM:,}": LONGEST_SUM}
    return found | {f"bfloat16, 2 digits, cut off, {name} terms": CutOffProducts(2, n) for name, n in blocks.items()}


def errors(reference: ReferenceSet, t: float, latents: int, cut: int) -> list[str]:
    """Measure the squared error per dimension of each kind of products; return texts with the standard error."""
    generator = keyed_generator("cpu", 0)
    x = reference.take(torch.randint(reference.N, (latents,), generator=generator))
    level = torch.full((latents,), t, dtype=torch.float64)
    z = forward_noise(x, level, torch.randn(x.shape, generator=generator))
    expected, _ = float_sums(reference, z, level)
    cells = []
    for products in measured_products().values():
        rows = slice(min(cut, latents) if isinstance(products, CutOffProducts) else latents)
        mean, _ = digit_sums(reference, z[rows], level[rows], products)
        cells.append(cell(*mean_and_error((mean - expected[rows]).square().flatten(1).mean(1))))
    return cells


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the errors and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="zip or folder of images, or an array file")
    parser.add_argument("--t", type=float, nargs="+", default=LEVELS, help="noise levels")
    parser.add_argument("--latents", type=int, default=64, help="latents at each noise level")
    parser.add_argument("--cut", type=int, default=16, help="latents whose sums are cut off, which is slow")
    parser.add_argument("--output", type=Path, help="write STEM.md as well")
    args = parser.parse_args(arguments)
    output = Output(args.output, "md")
    reference = ReferenceSet(load(args.data))
    found = [["t", *measured_products()]]
    for t in args.t:
        found.append([f"{t:g}", *errors(reference, t, args.latents, args.cut)])
        print(f"t={t:g} measured", file=sys.stderr, flush=True)
    head = f"{reference.N} images of {reference.shape}, {args.latents} latents a level, torch {torch.__version__}"
    output.tell(f"{head}\n\n{markdown(found)}")


if __name__ == "__main__":
    main()
