"""Gives two evaluations of a network the same dropout masks, as the training of consistency models needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_default_rng, rng_state


class SharedDropout:
    """Seeds a device's default generator in the same way for each evaluation, here the student's and the teacher's.

    Args:
        device: the device of the network.
        key: the key of the masks.
    """

    def __init__(self, device: torch.device, *key: int) -> None:
        self._device = device
        self._key = key
        self._state: bytes | None = None

    @contextmanager
    def masks(self) -> Iterator[None]:
        """Let the networks inside the block draw from the beginning of the same stream.

        Raises InputError if they drew other numbers than those in the block before.
        """
        with keyed_default_rng(self._device, *self._key):
            yield
            # Equal states at the end mean that both drew equally many numbers.
            state = rng_state(self._device)

        if self._state not in (None, state):
            problem = "the net draws other random numbers with gradients than without"
            problem += ", so student and teacher cannot share dropout masks"
            advice = "if it is compiled, torch.compile has given up on one of the two"
            raise InputError(f"{problem}; {advice}")
        self._state = state
