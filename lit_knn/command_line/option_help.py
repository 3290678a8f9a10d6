"""Help of the options that take any network: it names the networks of the project, not the hundreds of PyTorch."""

import re
from argparse import Action
from typing import Any

from jsonargparse import DefaultHelpFormatter
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lit_knn import nets

KNOWN_MODULES = re.compile(r"known subclasses: torch\.nn\.Module\b[^)]*")


class Formatter(DefaultHelpFormatter):
    """Lists the classes of `lit_knn.nets` for an option that takes any `torch.nn.Module`."""

    def _get_help_string(self, action: Action) -> str:
        return KNOWN_MODULES.sub(_networks, super()._get_help_string(action))


class Parser(LightningArgumentParser):
    """Lightning's parser with this help, also for the options of a class (`--model.help LitICT`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, **kwargs})


def _networks(_: re.Match[str]) -> str:
    own = (getattr(nets, name) for name in nets.__all__)
    names = [f"lit_knn.nets.{kind.__name__}" for kind in own if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return f"classes: {', '.join(names)}, or your own: mine.Net of mine.py in this folder; see docs/extending.md"
