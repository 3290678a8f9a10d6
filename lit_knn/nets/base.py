"""The base of our networks. It checks the options, which are dataclass fields, and the shape of the images."""

import difflib
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError

NO_CLASS = -1
"""Label of an item without a class; the target of such an item averages over all images."""

if TYPE_CHECKING:
    NumberOfData = int
    NumbersOfData = Sequence[int]
else:
    # A config may say null for such an option. The command line then puts in its place what the
    # data have, and no network sees None.
    NumberOfData = int | None
    NumbersOfData = Sequence[int] | None

# The smallest allowed value of each integer option.
LEAST = {"in_channels": 1, "channels": 1, "blocks": 1, "num_classes": 0, "augment_dim": 0}
# Building a larger network could take minutes before an error shows that it is too large.
MOST_BLOCKS, MOST_RESOLUTIONS = 100, 16


class ImageNetwork(nn.Module):
    """Maps noisy images to images of the same shape.

    A subclass is a dataclass whose fields are the options. It lists only the fields that differ from its base class.
    Its `__post_init__` first calls the `__post_init__` of this class, and then makes the layers.
    """

    in_channels: NumberOfData

    def __post_init__(self) -> None:
        check_options(type(self).__name__, vars(self))
        super().__init__()

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise InputError if images cannot have this shape, (C, H, W)."""
        name = type(self).__name__
        if len(shape) != 3 or shape[0] != self.in_channels:
            raise InputError(
                f"{name}: in_channels={self.in_channels}, but the images have the shape {tuple(shape)}"
            )


def labels_for(net: nn.Module, class_label: Tensor | None, z: Tensor) -> Tensor | None:
    """Return the labels that a network gets for z (B, *shape).

    A network with classes always gets labels: `NO_CLASS` for each item in the place of None.
    """
    num_classes: Any = getattr(net, "num_classes", 0)
    if class_label is None and num_classes:
        return torch.full((len(z),), NO_CLASS, device=z.device)

    return class_label


def name_classes(net: Any, names: object) -> None:
    """Store the names of a network's classes 0, 1, … in it; raise InputError unless each class has its own."""
    number = getattr(net, "num_classes", 0)
    strings = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not strings or not len(set(names)) == len(names) == number:  # type: ignore[arg-type, call-overload]
        raise InputError(f"class_names must be {number} different names, got {names!r:.80}")
    net.class_names = list(names)  # type: ignore[call-overload]


def class_number(option: str, net: object, label: object) -> int:
    """Return the number of a network's class; raise InputError if the network does not have it.

    Args:
        option: name of the option that gives the class, for the message.
        net: the raw network.
        label: the class, by number or by name.
    """
    number = getattr(net, "num_classes", 0)
    names = getattr(net, "class_names", None)

    if not isinstance(label, str):
        if type(label) is int and 0 <= label < number:
            return label
        numbers = f": give a number from 0 to {number - 1}" if number else ""
        raise InputError(f"{option}={label!r:.80}, but the net has num_classes={number}{numbers}")
    if names is None:
        advice = " without names: give a number" if number else ""
        raise InputError(f"{option}={label!r:.80}, but the net has num_classes={number}{advice}")

    # Unicode has two forms of an accented letter, and systems differ in the one that they store.
    alike = [name for name in names if _normal_form(name) == _normal_form(label)]
    if label not in names and len(alike) == 1:
        label = alike[0]
    if label not in names:
        advice = f"the classes are {', '.join(names):.200}"
        near = difflib.get_close_matches(label, names, n=1)
        if near:
            advice = f"did you mean {near[0]}?"
        raise InputError(f"{option}={label!r:.80} is no class; {advice}")

    return names.index(label)


def _normal_form(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise InputError for an option that is out of its range; NaN is out of every range."""
    for option, value in options.items():
        if value is None:
            advice = "give it; only a config of a run takes it from the data"
            raise InputError(f"{name}: {option} is None: {advice}")

    for option, least in LEAST.items():
        if not options.get(option, least) >= least:
            raise InputError(f"{name}: {option} must be at least {least}, got {options[option]}")

    if options.get("blocks", 1) > MOST_BLOCKS:
        raise InputError(f"{name}: blocks must be at most {MOST_BLOCKS}, got {options['blocks']}")

    multipliers = options.get("multipliers", [1])
    if not 1 <= len(multipliers) <= MOST_RESOLUTIONS or not min(multipliers) >= 1:
        numbers = f"1 to {MOST_RESOLUTIONS} numbers of at least 1"
        raise InputError(f"{name}: multipliers must be {numbers}, got {list(multipliers)!r:.80}")

    for option in ("dropout", "label_dropout"):
        if not 0 <= options.get(option, 0) < 1:
            raise InputError(f"{name}: {option} must be in [0, 1), got {options[option]}")
