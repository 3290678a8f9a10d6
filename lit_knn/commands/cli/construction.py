"""Makes the objects that a configuration names, and tells in one line why one of them cannot be made."""

import inspect
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import is_out_of_memory, machine_bytes, tensor_bytes

# Errors in the constructors of these packages are faults of this program, unless they are `InputError`.
OWN_PACKAGES = ("lit_knn",)
GB = 1e9


def construct(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object of a class.

    Raises:
        InputError: the class does not take these arguments, or refuses their values; a file cannot be read; a network
            needs more memory than the machine has.
    """
    name = kind.__name__
    try:
        inspect.signature(kind).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{name}: {error}") from error
    except ValueError:
        pass  # A class written in C does not tell its arguments.
    own = kind.__module__.partition(".")[0] in OWN_PACKAGES
    try:
        # A training module is made of networks that exist already, or that a file holds.
        if own and issubclass(kind, nn.Module) and not issubclass(kind, pl.LightningModule):
            _check_size(kind, args, kwargs)
        return kind(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        if own and not is_about_the_machine(error):
            raise
        raise InputError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


def is_about_the_machine(error: BaseException) -> bool:
    """Tell whether a file, the memory or the range of numbers is at fault, and not the program."""
    return isinstance(error, (OSError, OverflowError)) or is_out_of_memory(error)


def _check_size(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    """Refuse a network whose weights are larger than the memory. On the meta device weights take none."""
    with torch.device("meta"):
        size, memory = tensor_bytes(kind(*args, **kwargs).parameters()), machine_bytes()
    if memory is not None and size > memory:
        raise InputError(
            f"{kind.__name__}: the weights take {size / GB:.4g} GB, more than the {memory / GB:.4g} GB of this machine"
        )
