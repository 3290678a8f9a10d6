"""The parser of the command line. Its help lists our networks, and it suggests names for misspelt options."""

import difflib
import re
from typing import Any

from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets

NETWORKS = re.compile(r"known\s+subclasses:\s+torch\.nn\.Module\b[^)]*")
NOT_ACCEPTED = re.compile(r"Option '([\w.]+)' is not accepted")


class Parser(LightningArgumentParser):
    """Lightning's parser, also for the options of a class (`--model.help LitICT`)."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """List the classes of `lit_knn.nets` where the parser lists every subclass of `torch.nn.Module`."""
        kinds = [kind for kind in map(vars(nets).get, nets.__all__) if isinstance(kind, type)]
        names = [f"lit_knn.nets.{kind.__name__}" for kind in kinds if issubclass(kind, nn.Module)]
        own = "or your own: mine.Net of mine.py in this folder; see docs/extending.md"
        return NETWORKS.sub(("\n" + " " * 24).join(["classes:", *names, own]), super().format_help(*args, **kwargs))

    def save(self, *args: Any, skip_none: bool = False, **kwargs: Any) -> None:
        """Save a configuration. It was checked when it was parsed, and a second check takes as long as parsing."""
        super().save(*args, skip_unset=skip_none, skip_validation=True, **kwargs)

    def dump(self, *args: Any, skip_none: bool = False, **kwargs: Any) -> str:
        """Write a configuration as YAML, without a second check likewise; Lightning gives `skip_none` its old name."""
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
