"""Makes the objects that a configuration names. If one cannot be made, an error explains why in one line."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import machine_bytes, tensor_bytes

GB = 1e9


def construct(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object of a class.

    Raises:
        InputError: the class refuses its arguments; a network needs more memory than the machine has; the constructor
            of a class that is not ours fails.
    """
    name = kind.__name__
    own = kind.__module__.startswith("lit_knn.")
    try:
        # A training module is made of networks that exist already, or that a file holds.
        if own and issubclass(kind, nn.Module) and not issubclass(kind, pl.LightningModule):
            _check_size(kind, args, kwargs)
        return kind(*args, **kwargs)
    except Exception as error:
        if own or isinstance(error, (InputError, OSError)):
            raise
        raise InputError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


def _check_size(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    """Refuse a network whose weights exceed the memory. On the meta device, weights take no memory."""
    with torch.device("meta"):
        size, memory = tensor_bytes(kind(*args, **kwargs).parameters()), machine_bytes()
    if memory is not None and size > memory:
        raise InputError(
            f"{kind.__name__}: the weights take {size / GB:.4g} GB, more than the {memory / GB:.4g} GB of this machine"
        )
