"""Products of real numbers with 8-bit codes, in small number types that a device multiplies fast.

A row of real numbers is split into digits, row = unit·Σ_j digit_j / base^j. The digits and the codes fit a small type,
and the products of each digit are summed in a larger one.
"""

from abc import ABC, abstractmethod
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.linalg import int8
from lit_knn.linalg.dtypes import is_native

# Compute capabilities of NVIDIA's cards for desktops (30, 40 and 50 series). By its data sheets they multiply int8 four
# times as fast as bfloat16 with float32 sums. On cards for servers (8.0, 9.0, 10.0) int8 is only twice as fast, and it
# needs more digits and more passes over its sums.
INT8_CAPABILITIES = ((8, 6), (8, 9), (12, 0))
# The first cards whose integer products PyTorch supports in all the layouts used here.
LEAST_CAPABILITY = (8, 0)
# Number of terms that a GPU sums by itself. Its matrix units cut off the last bits of such a sum after every few terms,
# so that the squared error grows with the square of this number. On CIFAR-10 this cutting, emulated, gives mean squared
# errors of 7e-12 for sums of 8,192 terms, and of 7e-13 for 2,048. float32 additions, which round, join these sums.
TERMS_PER_SUM = 2048


class Digits(NamedTuple):
    """Rows of real numbers as digits.

    Attributes:
        values: (count, B, d), the digits, the largest first.
        unit: (B, 1), float32, the unit of the first digit; None for 1.
    """

    values: Tensor
    unit: Tensor | None


class Products(ABC):
    """One way to multiply real numbers with codes, which are integers from −128 to 127.

    Args:
        digits: number of digits of a latent.
    """

    name: str
    """The number type, for messages."""

    weight_digits: int
    """Number of digits of the images' weights in a mean."""

    def __init__(self, digits: int) -> None:
        self.digits = digits

    def __repr__(self) -> str:
        return f"{self.digits} digits in {self.name}"

    @abstractmethod
    def part_bytes(self, d: int) -> int:
        """Return the bytes of the partial sums of one latent and one image of dimension d, at most."""

    @abstractmethod
    def operand(self, pixels: Tensor) -> Tensor:
        """Convert pixels p (c, d), uint8, to codes p − 128 in the type of the products."""

    @abstractmethod
    def split(self, rows: Tensor, count: int, largest: float | None = None) -> Digits:
        """Split rows (B, d), float32, into `count` digits.

        `largest` is the largest absolute value that rows may have, the same for all; None for the largest of each row.
        """

    @abstractmethod
    def multiply(self, digits: Tensor, matrix: Tensor) -> Tensor:
        """Compute Σ_j digit_j @ matrix / base^j, without the unit: (count, B, d) times (d, N) to (B, N), float32."""

    @abstractmethod
    def total(self, sums: Tensor) -> Tensor:
        """Compute Σ_j sum_j / base^j, the sum of a row, from the sums of its digits: (count, B) to (B, 1), float64."""


class Int8Products(Products):
    """Digits from −127 to 127, products of 8-bit integers. All sums of one digit's products are exact."""

    name = "int8"
    # Weights below the last digit of the largest weight are lost, and larger sets have more such weights. On CIFAR-10,
    # two digits of the weights would lose 30 times more than two digits of z.
    weight_digits = 3

    def part_bytes(self, d: int) -> int:
        """See `Products.part_bytes`. The sum in float32 comes on top of the digits' sums."""
        return 4 * (1 + max(self.digits, self.weight_digits))

    def operand(self, pixels: Tensor) -> Tensor:
        """See `Products.operand`."""
        return int8.pixel_codes(pixels)

    def split(self, rows: Tensor, count: int, largest: float | None = None) -> Digits:
        """See `Products.split`."""
        return Digits(*int8.digits_of(rows, count, largest))

    def multiply(self, digits: Tensor, matrix: Tensor) -> Tensor:
        """See `Products.multiply`."""
        return int8.product(digits, matrix)

    def total(self, sums: Tensor) -> Tensor:
        """See `Products.total`."""
        return reduce(torch.add, (row / int8.BASE**j for j, row in enumerate(sums))).unsqueeze(1)


class BFloat16Products(Products):
    """Digits in bfloat16, each the rest of the one before, rounded: 8 bits a digit. Sums are in float32.

    A code has 8 bits, so that bfloat16 holds it exactly. Small entries of a row keep as many bits as large ones. A CPU
    converts both factors to float32, which gives the same products, slowly: for tests and measurements.
    """

    name = "bfloat16"
    weight_digits = 2

    def part_bytes(self, d: int) -> int:
        """See `Products.part_bytes`."""
        return 4 * max(self.digits, self.weight_digits) * -(-d // TERMS_PER_SUM)

    def operand(self, pixels: Tensor) -> Tensor:
        """See `Products.operand`."""
        # One operation on a GPU reads 8 bits and writes 16. The number stays on the CPU, and nothing waits for it.
        return pixels - torch.tensor(128.0, dtype=torch.bfloat16)

    def split(self, rows: Tensor, count: int, largest: float | None = None) -> Digits:
        """See `Products.split`."""
        values = torch.empty(count, *rows.shape, dtype=torch.bfloat16, device=rows.device)
        values[0] = rows
        for j, (larger, digit) in enumerate(pairwise(values), start=2):
            # One operation on a GPU subtracts and rounds.
            torch.sub(rows, larger, out=digit)
            if j < count:
                rows = rows - larger
        return Digits(values, None)

    def multiply(self, digits: Tensor, matrix: Tensor) -> Tensor:
        """See `Products.multiply`."""
        count, batch, terms = digits.shape
        rows = digits.flatten(0, 1)
        block = -(-terms // -(-terms // TERMS_PER_SUM))
        # The matrix units read 16 bytes at a time, from addresses in multiples of 16.
        block = min(-(-block // 8) * 8, terms)
        whole = terms // block * block
        sums = _float32_products(
            rows[:, :whole].unflatten(1, (-1, block)).transpose(0, 1), matrix[:whole].unflatten(0, (-1, block))
        )
        total = sums.view(-1, batch, matrix.shape[1]).sum(0)
        if whole < terms:
            rest = _float32_products(rows[:, whole:].unsqueeze(0), matrix[whole:].unsqueeze(0))
            total += rest.view(count, batch, matrix.shape[1]).sum(0)
        return total

    def total(self, sums: Tensor) -> Tensor:
        """See `Products.total`."""
        return sums.sum(0).unsqueeze(1)


def products_for(device: torch.device) -> type[Products] | None:
    """Choose the products of pixels on a device. Returns None where only float64 is left.

    A CPU takes 8-bit integers if it has instructions for them. A GPU takes them if it multiplies them four times as
    fast as bfloat16, and otherwise bfloat16 if it has it.
    """
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) in INT8_CAPABILITIES:
            return Int8Products
        return BFloat16Products if is_native(torch.bfloat16, device) else None
    return Int8Products if is_native(torch.int8, device) else None


def multiplies_int8(device: torch.device) -> bool:
    """Tells whether `Int8Products` run fast on the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return is_native(torch.int8, device)


def _float32_products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, never rounded to bfloat16, for bfloat16 matrices (m, R, K) and (m, K, C): (m, R, C), float32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
