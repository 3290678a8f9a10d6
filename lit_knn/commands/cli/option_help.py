"""The parser of the command line: a help that shows first what users set most, and names where one was misspelt."""

import difflib
import re
from argparse import Action
from typing import Any

from jsonargparse import DefaultHelpFormatter
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets

NOT_ACCEPTED = re.compile(r"Option '([\w.]+)' is not accepted")
KNOWN_MODULES = re.compile(r"known subclasses: torch\.nn\.Module\b[^)]*")


# Lightning's trainer has four hundred lines, so it comes after what is set more often.
TITLES = {
    "model": "Model (--model.help CLASS lists its options)",
    "data": "Data (--data.help CLASS lists its options)",
    "optimizer": "Optimizer",
    "lr_scheduler": "Schedule of the learning rate",
    "trainer": "Trainer of PyTorch Lightning",
}
PARTS = [*TITLES, "Linked arguments"]


class Formatter(DefaultHelpFormatter):
    """Lists the classes of `lit_knn.nets` for an option that takes any `torch.nn.Module`."""

    def _get_help_string(self, action: Action) -> str:
        return KNOWN_MODULES.sub(_networks, super()._get_help_string(action))


class Parser(LightningArgumentParser):
    """Lightning's parser with this help, also for the options of a class (`--model.help LitICT`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, **kwargs})

    def format_help(self, formatter: Any = None) -> str:
        """Describe a command: its own options first, its trainer last, and a usage of one line."""
        groups: Any = self._action_groups
        parts = {group: _part(group) for group in groups}
        if "trainer" in parts.values():
            self.usage = "%(prog)s [-c CONFIG ...] [--OPTION VALUE ...]"
            groups.sort(key=lambda group: PARTS.index(parts[group]) if parts[group] in PARTS else -1)
            for group, part in parts.items():
                group.title = TITLES.get(part, group.title)
        return super().format_help(formatter)

    def save(self, *args: Any, skip_validation: bool = True, **kwargs: Any) -> None:
        """Save a configuration. It was checked when it was parsed, and a second check takes as long as parsing."""
        super().save(*args, skip_validation=skip_validation, **kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Check values; an option that the class does not have is told with the option of the nearest name, or all."""
        try:
            super().validate(*args, **kwargs)
        except KeyError as error:
            unknown = NOT_ACCEPTED.fullmatch(str(error))
            if unknown:
                options = sorted(
                    {name for action in self._actions if (name := action.dest.partition(".")[0]) != "help"}
                )
                near = difflib.get_close_matches(unknown[1], options, n=1)
                error.args = (
                    f"{error}; did you mean {near[0]}?" if near else f"{error}; it has {', '.join(options) or 'none'}",
                )
            raise


def _part(group: Any) -> str:
    """Return which part of a run a group of options is for: the name of its first option, else its title."""
    first = group._group_actions[0].dest.removesuffix(".help") if group._group_actions else ""
    return first if first in TITLES else group.title


def _networks(_: re.Match[str]) -> str:
    own = (getattr(nets, name) for name in nets.__all__)
    names = [f"lit_knn.nets.{kind.__name__}" for kind in own if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return f"classes: {', '.join(names)}, or your own: mine.Net of mine.py in this folder; see docs/extending.md"
