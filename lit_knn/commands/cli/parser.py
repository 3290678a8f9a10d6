"""The parser of the command line: its help lists our networks, it suggests options, and it makes the objects."""

import difflib
import re
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets
from lit_knn.common.errors import InputError, first_line
from lit_knn.common.memory import machine_bytes, tensor_bytes

NETWORKS = re.compile(r"known\s+subclasses:\s+torch\.nn\.Module\b[^)]*")
NOT_ACCEPTED = re.compile(r"Option '([\w.]+)' is not accepted")
GB = 1e9


class Parser(LightningArgumentParser):
    """Lightning's parser, also for the options of a class (`--model.help LitICT`)."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """List the classes of `lit_knn.nets` where the parser lists every subclass of `torch.nn.Module`."""
        kinds = [kind for kind in map(vars(nets).get, nets.__all__) if isinstance(kind, type)]
        names = [f"lit_knn.nets.{kind.__name__}" for kind in kinds if issubclass(kind, nn.Module)]
        own = "or your own: mine.Net of mine.py in this folder; see docs/extending.md"
        return NETWORKS.sub(("\n" + " " * 24).join(["classes:", *names, own]), super().format_help(*args, **kwargs))

    # A configuration was checked when it was parsed, and a second check takes as long as parsing. Lightning gives
    # `skip_none` its old name.

    def save(self, *args: Any, skip_none: bool = False, **kwargs: Any) -> None:
        super().save(*args, skip_unset=skip_none, skip_validation=True, **kwargs)

    def dump(self, *args: Any, skip_none: bool = False, **kwargs: Any) -> str:
        return super().dump(*args, **{"skip_unset": skip_none, "skip_validation": True, **kwargs})

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Check values; for an option that the class does not have, add the nearest name to the error, or all."""
        try:
            super().validate(*args, **kwargs)
        except KeyError as error:
            if unknown := NOT_ACCEPTED.fullmatch(str(error)):
                options = sorted({name.partition(".")[0] for name in vars(self.get_defaults())})
                near = difflib.get_close_matches(unknown[1], options, n=1)
                told = f"did you mean {near[0]}?" if near else f"it has {', '.join(options) or 'none'}"
                error.args = (f"{error}; {told}",)
            raise


def construct(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object of a class; if a class that is not ours fails, an error names it in one line."""
    own = kind.__module__.startswith("lit_knn.")
    try:
        # A training module is made of networks that exist already, or that a file holds.
        if own and issubclass(kind, nn.Module) and not issubclass(kind, pl.LightningModule):
            _check_size(kind, args, kwargs)
        return kind(*args, **kwargs)
    except Exception as error:
        if own or isinstance(error, (InputError, OSError)):
            raise
        raise InputError(f"{kind.__name__}: {type(error).__name__}: {first_line(error)}") from error


def _check_size(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    """Refuse a network whose weights exceed the memory. On the meta device, weights take no memory."""
    with torch.device("meta"):
        size, memory = tensor_bytes(kind(*args, **kwargs).parameters()), machine_bytes()
    if memory is not None and size > memory:
        raise InputError(
            f"{kind.__name__}: the weights take {size / GB:.4g} GB, more than the {memory / GB:.4g} GB of this machine"
        )
