"""Fills the network's null options (channels, classes) with the numbers of the data, before any object is made.

The settings of the run then have the numbers, so it resumes and loads like any other run.
"""

import inspect
import math
from collections.abc import Sequence
from pkgutil import resolve_name

import numpy as np
import pytorch_lightning as pl
from jsonargparse import Namespace

from lit_knn.commands.cli.arguments import as_dict
from lit_knn.commands.cli.one_object import make_object
from lit_knn.commands.cli.replaced import declaring_class
from lit_knn.common.errors import InputError
from lit_knn.data import ReferenceDataModule
from lit_knn.data.files import say
from lit_knn.data.labels import class_numbers
from lit_knn.data.parts import Labels

# These options of a network can be taken from the data.
OPTIONS = ("in_channels", "image_size", "num_classes", "multipliers")
# Attention at the coarsest resolution compares all positions, so it should have few.
COARSEST_SIDE = 8


def fill_network(options: Namespace) -> None:
    """Replace the null options of the model's network, in place, by numbers of the data, and print a line about it.

    The labels are read only if the model is class-conditional.

    Args:
        options: the parsed options of a command.

    Raises:
        InputError: the data are no images, or have no labels for a class-conditional model.
    """
    model = options.model.get("init_args") or Namespace()
    net = model.get("net")
    net_args = net.get("init_args") if isinstance(net, Namespace) else None
    if net_args is None:
        return

    names = [name for name in OPTIONS if name in net_args and net_args[name] is None]
    is_conditional = bool(model.get("class_conditional"))
    if "num_classes" in names and not is_conditional and _null_means_no_classes(net.class_path):
        names.remove("num_classes")
    if not names:
        return

    data = _make_data_module(options.data)
    needs_labels = is_conditional and "num_classes" in names
    labels = None
    # Only `plan` has this option. If it is given, `plan` needs no data.
    shape = tuple(options.get("image_shape") or ())
    if not shape or needs_labels:
        shape_of_data, labels = _shape_and_labels(data, needs_labels)
        shape = shape or shape_of_data
    if len(shape) != 3:
        rule = f"{', '.join(names)} can be taken from images alone: give numbers"
        raise InputError(f"--model.net: {rule}; the data are of shape {shape}")

    channels, height, width = shape
    described = f"{channels} channel{'s' if channels > 1 else ''}, {width}x{height}"
    num_classes = 0
    if needs_labels:
        num_classes = _count_classes(labels)
        described += f", {num_classes} classes"

    values = numbers_of_data(shape, num_classes)
    for name in names:
        net_args[name] = values[name]
    taken = ", ".join(f"{name}={values[name]}" for name in names)
    say(f"{data.source_name}: {described}; the network gets {taken}")


def numbers_of_data(shape: Sequence[int], num_classes: int) -> dict[str, int | list[int]]:
    """Return a network's options by name for images of `shape`, (C, H, W).

    The network halves the sides until the longer one is near 8, but at least once. The multipliers of
    its width, one for each resolution, are 1, 2, 4, 4 and so on.
    """
    channels, height, width = shape
    side = max(height, width)
    halvings = max(1, round(math.log2(side / COARSEST_SIDE)))
    multipliers = [1, 2] + [4] * (halvings - 1)
    return {
        "in_channels": channels,
        "image_size": side,
        "num_classes": num_classes,
        "multipliers": multipliers,
    }


def _null_means_no_classes(class_path: str) -> bool:
    """Return whether None is a network's own default of `num_classes`, as in OpenAI's code of ADM.

    To such a network 0 may mean something else.
    """
    kind = resolve_name(class_path)
    # A class may pass the option on to the class that it inherits from.
    maker = declaring_class(kind, "num_classes") if isinstance(kind, type) else kind
    if maker is None:
        return False
    number = inspect.signature(maker).parameters.get("num_classes")
    return number is not None and number.default is None


def _make_data_module(options: Namespace) -> ReferenceDataModule:
    """Make a data module of these options, apart from the run's, only to ask for shape and labels."""
    data = make_object(pl.LightningDataModule, "data", as_dict(options))
    if not isinstance(data, ReferenceDataModule):
        rule = "null options of the network need a ReferenceDataModule"
        raise InputError(f"--model.net: {rule}, the data are {type(data).__name__}")
    return data


def _shape_and_labels(
    data: ReferenceDataModule, needs_labels: bool
) -> tuple[tuple[int, ...], Labels]:
    """Return the shape of an image, and the labels, (N,) integers, or None if they are not needed.

    The data are read at most once. Most data modules know the shape without reading images.
    """
    stored = data.stored()
    if stored is None:  # The data module does not know the shape.
        data.prepare_data()
        data.needs_labels = needs_labels
        images, labels = data.load()
        return tuple(images.shape[1:]), labels

    labels = None
    if needs_labels:
        data.prepare_data()
        labels = data.read_labels()
    return tuple(stored.shape[1:]), labels


def _count_classes(labels: Labels) -> int:
    """Return the number of classes. The model checks later that their numbers have no gap."""
    if labels is None:
        raise InputError("class_conditional=True, but the data has no labels")
    numbers = np.asarray(labels)
    return len(np.unique(class_numbers(numbers, len(numbers))))
