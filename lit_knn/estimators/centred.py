"""The images of a set in float32 pieces, centred so that float32 keeps their digits."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_knn.common.memory import work_bytes
from lit_knn.index.precision import add_product, is_native, whole_tiles
from lit_knn.reference import ReferenceSet, to_model_space

# Bytes of images per product, which a CPU's caches hold, and maximum number of images per product,
# because float32 sums them. Threads wait for each other after each piece.
CHUNK_BYTES, CHUNK = 6 * 2**20, {"cpu": 1024, "cuda": 8192}

# float32 rounds a score by about this share of the sum of its absolute terms.
ROUNDING = 2.0**-21
# An image is computed again in float64 if its share of the posterior, times the rounding of its
# log-likelihood, exceeds this number. The number bounds the squared error by 1e-5 · rounding ·
# variance of the posterior.
TOLERANCE = 1e-5
# Bounds of 1/t² in float32: above the first only the best image is likely, below its inverse all are.
MOST_FACTOR = 1e37


class Latents(NamedTuple):
    """b latents in the units of `CentredImages`."""

    u: Tensor
    """(b · halves, d), float32: each centred z; its mirror image follows if images are mirrored."""

    half_sq_norm: Tensor
    """(b, 1), float64: half the squared norm of the centred z."""

    noise: Tensor
    """(b, 1), float64: the variance of the noise, t² in these units."""


class CentredImages:
    """The stored images x of a set as x = offset + unit · c, where float32 keeps the digits of c.

    Pixels p become c = p − 127.5, which even bfloat16 holds exactly. Floats far from 0 become
    differences from their mean.

    Args:
        part: the images.
        latents: number of latents that are multiplied at a time.

    Attributes:
        shift: pieces that are not centred hold y = c + shift.
        half_sq_norms: ‖c‖²/2 of the stored images, float32.
        halves: 2 if mirror images count, else 1.
    """

    def __init__(self, part: ReferenceSet, latents: int) -> None:
        self.part = part
        self.dtype = torch.float32
        self.halves = 2 if part.hflip else 1
        self.unit = 1.0
        self.shift = 0.0
        self.offset: Tensor | float = 0.0

        if part.images.dtype == torch.uint8:
            self.unit, self.shift = 1 / 127.5, 127.5
            if part.device.type == "cuda" and is_native(torch.bfloat16, part.device):
                self.dtype = torch.bfloat16
        elif part.cached("far from 0", self._is_far_from_0):
            mean = part.mean().reshape(part.shape)
            # Mirrored images need a centre that is its own mirror image.
            self.offset = (mean + mean.flip(-1)) / 2 if part.hflip else mean

        if part.device.type == "cpu":
            size = CHUNK_BYTES // part.d
        else:
            size = work_bytes(part.device) // max(part.d, latents)
        self.step = min(whole_tiles(size // 4), CHUNK[part.device.type])
        self.half_sq_norms = part.cached("half squared norms", self._half_sq_norms)

    def pieces(
        self, ids: Tensor | None = None, centred: bool = True
    ) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield rows and their images, (n, d). The next step may overwrite them.

        Args:
            ids: ascending numbers of the images; by default all.
            centred: whether to yield c. If not, pixels come as they are, which saves a pass over them.
        """
        stored = self.part.images
        every = (slice(i, i + self.step) for i in range(0, len(stored), self.step))
        # New memory for each piece would cost more time than the conversion.
        buffer = torch.empty(
            min(self.step, len(stored)), self.part.d, dtype=self.dtype, device=self.part.device
        )
        for rows in every if ids is None else ids.split(self.step):
            images = stored[rows].flatten(1)
            if images.dtype != self.dtype or isinstance(self.offset, Tensor):
                images = buffer[: len(images)].copy_(images)
            if self.shift and centred:
                images.sub_(self.shift)
            if isinstance(self.offset, Tensor):
                images.sub_(self.offset.flatten())
            yield rows, images

    def latents(self, z: Tensor, t: Tensor) -> Latents:
        """Centre z (b, *shape) at t (b,)."""
        centred = z.double() - self.offset
        norm = torch.linalg.vector_norm(centred.flatten(1), dim=1, keepdim=True)

        u = centred.float().div_(self.unit)
        if self.halves == 2:
            # ‖u − mirror(c)‖ = ‖mirror(u) − c‖.
            u = torch.stack([u, u.flip(-1)], 1).flatten(0, 1)
        noise = (t / self.unit).square().unsqueeze(1)
        return Latents(u.flatten(1), norm.div_(self.unit).square_() / 2, noise)

    def scores(self, latents: Latents) -> Tensor:
        """Return u·c − ‖c‖²/2 for all images, mirrored ones too: (b, N) float32.

        A score is the logarithm of the likelihood, times the noise, up to a constant of the latent.
        """
        scores = (-self.half_sq_norms).repeat(len(latents.u), 1)
        for rows, c in self.pieces():
            add_product(scores[:, rows], latents.u, c.T)
        return scores.view(-1, self.part.N)

    def _is_far_from_0(self) -> bool:
        """Return whether the mean has more than half of the images' squared norms.

        Otherwise centring gains little.
        """
        some = to_model_space(self.part.images[:1024]).flatten(1)
        return bool(some.square().sum(1).mean() < 2 * self.part.mean().square().sum())

    def _half_sq_norms(self) -> Tensor:
        # Norms that are kept piece by piece would split the memory that each piece frees, and none
        # could use it again.
        norms = torch.empty(len(self.part.images), dtype=torch.float32, device=self.part.device)
        for rows, c in self.pieces():
            norms[rows] = c.double().square().sum(1) / 2
        return norms


def rounding_of(images: CentredImages, latents: Latents, best: Tensor) -> Tensor:
    """Return how far float32 may round the log-likelihoods, (b, 1), from the best score (b, 1)."""
    terms = best.abs() + 2 * images.half_sq_norms.amax()
    return ROUNDING * terms / latents.noise


def inverse(noise: Tensor) -> Tensor:
    """Return 1 / noise in the range of float32."""
    return (1 / noise).float().clamp(1 / MOST_FACTOR, MOST_FACTOR)
