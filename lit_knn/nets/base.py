"""The base of our networks, whose options are dataclass fields, and the labels of their classes."""

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_knn.common.deferred_checks import refuse
from lit_knn.common.errors import InputError, check_at_least, nearest

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


class ImageNetwork(nn.Module):
    """Maps noisy images to images of the same shape.

    A subclass is a dataclass whose fields are the options. It lists only the fields that differ from its base class.
    Its `__post_init__` first calls the `__post_init__` of this class, and then makes the layers.
    """

    in_channels: NumberOfData

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option, value in vars(self).items():
            if value is None:
                advice = "give it; only a config of a run takes it from the data"
                raise InputError(f"{name}: {option} is None: {advice}")
            # Otherwise a network without blocks, or one that always drops its labels, would be trained without a word.
            if option in ("blocks", "channels"):
                check_at_least(1, **{f"{name}: {option}": value})
            if option == "multipliers" and (not value or min(value) < 1):
                raise InputError(f"{name}: multipliers must be numbers from 1, got {list(value)}")
            if option in ("dropout", "label_dropout") and not 0 <= value < 1:
                raise InputError(f"{name}: {option} must be in [0, 1), got {value}")
        super().__init__()

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise InputError if images cannot have this shape, (C, H, W)."""
        if len(shape) != 3 or shape[0] != self.in_channels:
            images = f"the images have the shape {tuple(shape)}"
            raise InputError(f"{type(self).__name__}: in_channels={self.in_channels}, but {images}")


def classes_of(net: object) -> int:
    """Return the number of classes of a network, its `num_classes`; 0 if it has no such attribute, or None there."""
    return int(getattr(net, "num_classes", None) or 0)


def labels_for(net: nn.Module, class_label: Tensor | None, z: Tensor) -> Tensor | None:
    """Return the labels that a network gets.

    Args:
        net: the raw network. One with classes always gets labels.
        class_label: (B,), or None, in whose place each item gets `NO_CLASS`.
        z: (B, *shape).
    """
    num_classes = classes_of(net)
    if class_label is None and num_classes:
        return torch.full((len(z),), NO_CLASS, device=z.device)

    return class_label


def tensor_of_net(net: nn.Module, output: object) -> Tensor:
    """Return what a raw network has returned; raise InputError unless it is a tensor."""
    if isinstance(output, Tensor):
        return output
    problem = (
        f"{type(net).__name__} returns {type(output).__name__}, and a net must return a tensor"
    )
    # Models of diffusers return an object with this attribute.
    advice = ": lit_knn.nets.Diffusers wraps such a model" if hasattr(output, "sample") else ""
    raise InputError(problem + advice)


def one_hot(net: nn.Module, class_label: Tensor) -> Tensor:
    """Return one row for each integer, (..., num_classes) float32; `NO_CLASS` is all zeros.

    Raises InputError for a number that is no class. On a GPU it may come later, see `refuse`.

    Args:
        net: the raw network, which has the classes.
        class_label: integers of any shape.
    """
    num_classes = classes_of(net)

    def unknown(check: int, value: float, where: str) -> InputError:
        rule = f"num_classes={num_classes}, but a class label is {value:.0f}"
        return InputError(f"{type(net).__name__}: {rule}{where}")

    # A compiled network cannot branch on a value, so the data module must check the labels for it.
    if not torch.compiler.is_compiling() and class_label.numel() > 0:
        ends = torch.stack(class_label.aminmax())
        bad = torch.stack([ends[0] < NO_CLASS, ends[1] >= num_classes])
        refuse(f"{type(net).__name__}: labels", bad, lambda: ends, unknown)

    known = torch.arange(num_classes, device=class_label.device)
    return (class_label[..., None] == known).float()


def name_classes(net: nn.Module, names: Sequence[str]) -> None:
    """Store the names of a network's classes 0, 1, … in it.

    Raises InputError unless each class has a name that no other has.
    """
    number = classes_of(net)
    if not len(set(names)) == len(names) == number:
        raise InputError(f"class_names must be {number} different names, got {names!r:.80}")
    net.class_names = list(names)  # type: ignore[assignment]


def class_number(option: str, net: object, label: object) -> int:
    """Return the number of a network's class; raise InputError if the network does not have it.

    Args:
        option: name of the option that gives the class, for the message.
        net: the raw network.
        label: the class, by number or by name.
    """
    number = classes_of(net)
    names = getattr(net, "class_names", None)

    if names is None or not isinstance(label, str):
        # In Python, True is an integer.
        if type(label) is int and 0 <= label < number:
            return label
        advice = ""
        if number:
            unnamed = " without names" if isinstance(label, str) else ""
            advice = f"{unnamed}: give a number from 0 to {number - 1}"
        raise InputError(f"{option}={label!r:.80}, but the net has num_classes={number}{advice}")

    # Unicode has two forms of an accented letter, and systems differ in the one that they store.
    alike = [name for name in names if _normal_form(name) == _normal_form(label)]
    if label not in names and len(alike) == 1:
        label = alike[0]
    if label not in names:
        advice = nearest(str(label), names) or f"; the classes are {', '.join(names):.200}"
        raise InputError(f"{option}={label!r:.80} is no class{advice}")

    return names.index(label)


def _normal_form(name: str) -> str:
    return unicodedata.normalize("NFC", name)
