"""The handwritten digits that scikit-learn ships, as images."""

import numpy as np


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the 1,797 digits, (N, 1, 8, 8) uint8, whose values 0..16 are spread over 0..255, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None], digits.target
