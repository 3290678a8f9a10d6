"""Gives two evaluations of a network the same dropout masks, as the training of consistency models needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_default_rng, rng_state


class Float32Masks(TorchFunctionMode):
    """Draws the masks of dropout as float32 numbers, whatever the type of the values.

    A kernel of a GPU may draw other masks for half precision, because it gives more values to each of its threads.
    """

    def __torch_function__(
        self,
        function: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        """Call a function of PyTorch, or `float32_dropout` in the place of its dropout."""
        if function is F.dropout:
            function = float32_dropout
        return function(*args, **(kwargs or {}))


def float32_dropout(
    values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drop values (any shape) with the probability p under a mask that is drawn in float32; `inplace` has no effect."""
    ones = torch.ones(values.shape, dtype=torch.float32, device=values.device)
    return values * F.dropout(ones, p, training).to(values.dtype)


class SharedDropout:
    """Seeds a device's default generator in the same way for each evaluation, here the student's and the teacher's.

    Args:
        device: the device of the network.
        key: the key of the masks.
        mixed: whether the evaluations differ in precision under autocast.
    """

    def __init__(self, device: torch.device, *key: int, mixed: bool = False) -> None:
        self._device = device
        self._key = key
        self._mixed = mixed
        self._state: bytes | None = None

    @contextmanager
    def masks(self) -> Iterator[None]:
        """Let the networks inside the block draw from the beginning of the same stream.

        Raises InputError if they drew other numbers than those in the block before.
        """
        mixed = self._mixed and torch.is_autocast_enabled(self._device.type)
        with (
            keyed_default_rng(self._device, *self._key),
            Float32Masks() if mixed else nullcontext(),
        ):
            yield
            # Equal states at the end mean that both drew equally many numbers.
            state = rng_state(self._device)

        if self._state not in (None, state):
            problem = "the net draws other random numbers with gradients than without"
            problem += ", so student and teacher cannot share dropout masks"
            advice = "if it is compiled, torch.compile has given up on one of the two"
            raise InputError(f"{problem}; {advice}")
        self._state = state
