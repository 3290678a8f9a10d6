"""Generated data of the cases. They depend on a seed alone: every value is rounded, so that no CPU's last bits show."""

import numpy as np

# Values are multiples of this number, which float32 holds exactly.
STEP = 2.0**-12
GMM_DIMENSION, GMM_MODES, GMM_WIDTH = 64, 64, 0.3
LATENT_GROUPS, LATENT_CHANNELS, LATENT_SIZE = 100, 4, 16
# A latent is its group's centre plus its own part, with these shares of the variance.
GROUP_SHARE = 0.5


def toy2d() -> np.ndarray:
    """Return 2,000 points (N, 2), uniform on the black squares of a 4x4 checkerboard on [-1, 1]²."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 4, 2000)
    columns = 2 * rng.integers(0, 2, 2000) + rows % 2
    corners = np.stack([columns, rows], axis=1)
    return _rounded((corners + rng.random((2000, 2))) / 2 - 1)


def gmm64() -> np.ndarray:
    """Return 10,000 points (N, 64) of 64 Gaussians: centres of variance 1, points around them of deviation 0.3."""
    rng = np.random.default_rng(64)
    centres = rng.standard_normal((GMM_MODES, GMM_DIMENSION))
    modes = rng.integers(0, GMM_MODES, 10_000)
    return _rounded(centres[modes] + GMM_WIDTH * rng.standard_normal((10_000, GMM_DIMENSION)))


def latents() -> np.ndarray:
    """Return 20,000 latents (N, 4, 16, 16) of variance about 1 in 100 groups, whose spectrum falls as 1 / frequency."""
    rng = np.random.default_rng(16)
    shape = (LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    frequency = np.hypot(*np.meshgrid(np.arange(LATENT_SIZE), np.arange(LATENT_SIZE), indexing="ij"))
    deviation = 1 / (1 + frequency)
    deviation *= LATENT_SIZE / np.sqrt(np.square(deviation).sum())
    basis = _cosines(LATENT_SIZE)
    centres = rng.standard_normal((LATENT_GROUPS, *shape))
    groups = rng.integers(0, LATENT_GROUPS, 20_000)
    made = np.empty((20_000, *shape), np.float32)
    # In pieces, so that float64 takes little memory.
    for start in range(0, len(made), 2000):
        own = rng.standard_normal((2000, *shape))
        mixed = GROUP_SHARE**0.5 * centres[groups[start : start + 2000]] + (1 - GROUP_SHARE) ** 0.5 * own
        made[start : start + 2000] = _rounded(basis.T @ (deviation * mixed) @ basis)
    return made


def _cosines(size: int) -> np.ndarray:
    """Return the orthonormal cosine basis, (size, size): row f has frequency f."""
    f, i = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    basis = np.cos(np.pi * f * (2 * i + 1) / (2 * size)) * np.sqrt(2 / size)
    basis[0] /= np.sqrt(2)
    return basis


def _rounded(values: np.ndarray) -> np.ndarray:
    return (np.round(values / STEP) * STEP).astype(np.float32)
