"""Checks the options and data of class-conditional training and sampling, and draws the class of each sample."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lit_knn.common.checkpoint_file import Content
from lit_knn.common.errors import InputError, check_is
from lit_knn.common.memory import to_device
from lit_knn.common.rng import keyed_generator
from lit_knn.estimators import Estimator, class_conditional
from lit_knn.nets.base import NO_CLASS, class_number, classes_of, name_classes
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.guidance import check_guidance
from lit_knn.sampling.noise_grid import LevelRange
from lit_knn.sampling.samplers import seeded_classes

NUMBER = re.compile(r"-?[0-9]+")
# A name in quotes, for names that the command line would read as something else.
QUOTED = re.compile(r"(['\"])(.*)\1", re.DOTALL)
# The command line reads these words as no value.
NULLS = ("null", "Null", "NULL", "None", "~")


def labels_on(device: torch.device, class_label: Tensor | None) -> Tensor | None:
    """Copy labels (B,), if there are any, to the device of the network; see `to_device`."""
    return None if class_label is None else to_device(class_label, device)


class Conditioning:
    """Says whether a model gets class labels, and checks that its network and its data allow this setting.

    Args:
        net: its network, or the `Network` that samples; it has `num_classes` if it knows classes.
        class_conditional: whether the model gets labels.
        sampling_class: class of all samples, by name or by number; None draws one for each seed. A
            name wins over a number. If the name of any class is a number, only names are accepted.
        label_dropout: probability of training an item without its class.

    Attributes:
        num_classes: the network's number of classes, 0 if it is unconditional.
        drops_labels: whether training hides some of the labels, as guidance needs.
    """

    def __init__(
        self,
        net: Any,
        class_conditional: bool,
        sampling_class: str | int | None,
        label_dropout: float = 0.0,
    ) -> None:
        num_classes = classes_of(net)
        if class_conditional != (num_classes > 0):
            raise InputError(
                f"class_conditional={class_conditional}, but the net has num_classes={num_classes}"
            )
        if not 0 <= label_dropout < 1:
            raise InputError(f"label_dropout must be at least 0 and below 1, got {label_dropout}")
        if label_dropout and not class_conditional:
            raise InputError(f"label_dropout={label_dropout}, but class_conditional is false")

        dropout_of_net = getattr(net, "label_dropout", 0)
        if label_dropout and dropout_of_net:
            raise InputError(
                f"label_dropout={label_dropout}, but the net drops labels, too: set one to 0"
            )

        self.label_dropout = label_dropout
        self.drops_labels = bool(label_dropout or dropout_of_net)
        self.num_classes = num_classes
        self._net = net
        self._sampling_class = None if sampling_class is None else str(sampling_class)
        # Called for the error that a class raises here. Names of classes come later, from the data or a checkpoint.
        if not num_classes:
            self.chosen_class()

    def __bool__(self) -> bool:
        return self.num_classes > 0

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes 0, 1, …, or None if they have none."""
        return getattr(self._net, "class_names", None)

    def chosen_class(self) -> int | None:
        """Return the number of the class of all samples, or None if `sampling_class` is None.

        Raises InputError if there is no such class.
        """
        text, names = self._sampling_class, self.class_names or []
        if text is None:
            return None

        quoted = QUOTED.fullmatch(text)
        if text not in names and quoted and quoted[2] in names:
            text = quoted[2]

        # Beside a class called 1, the number 2 might mean the second class or a class called 2.
        named_by_number = any(NUMBER.fullmatch(name) for name in names)
        if NUMBER.fullmatch(text) and not named_by_number:
            return class_number("sampling_class", self._net, int(text))

        return class_number("sampling_class", self._net, text)

    def estimator_for(self, estimator: Estimator, level_range: LevelRange) -> Estimator:
        """Return an estimator that averages over the images of each item's class, if the model gets labels.

        Raises InputError for what is no estimator, and if a noise level of it is outside those of the training.
        """
        check_is(Estimator, estimator, "estimator")
        estimator.check_lies_within(*level_range.noise_range())
        if not self:
            return estimator
        # The target of an item without a class is the mean over all images.
        return class_conditional(estimator, unlabelled=self.label_dropout > 0)

    def check_data(self, reference: ReferenceSet, class_names: list[str] | None) -> None:
        """Check labels and classes of the data, and take over the names of its classes, if it has any."""
        if not self:
            return
        if reference.labels is None:
            raise InputError("class_conditional=True, but the data has no labels")
        if reference.sharded:
            raise InputError(
                "class_conditional=True needs all images on each device: set data.sharded to false"
            )

        self._check_labels(reference.labels.unique().tolist())
        if class_names is not None:
            name_classes(self._net, class_names)

        self._warn_of_hidden_names()
        self.chosen_class()  # Called for the InputError that an unknown name raises.

    def _check_labels(self, labels: list[int]) -> None:
        """Raise InputError if the labels of the data, ascending, are not 0 to `num_classes` − 1.

        A network with more classes than the data would also draw samples of classes that do not exist.
        """
        if labels == list(range(self.num_classes)):
            return

        # The problem is a gap in the labels, if there is one; otherwise it is their number.
        advice = f"give it {len(labels)}"
        for label in range(labels[-1]):
            if label not in labels:
                advice = f"no image has the label {label}, renumber the labels"
                break
        problem = f"the labels of the data are {labels[0]} to {labels[-1]}"
        raise InputError(f"{problem}, but the net has num_classes={self.num_classes}: {advice}")

    def _warn_of_hidden_names(self) -> None:
        """Warn of a class called "null" or the like, which the command line reads as None, if no class is chosen."""
        for name in self.class_names or ():
            if name in NULLS and self._sampling_class is None:
                option = f"--model.sampling_class \"'{name}'\""
                hidden = f"the command line reads {name} as no class"
                rank_zero_warn(f"{hidden}; the class {name} is {option}")

    def check_guidance(self, guidance: float) -> None:
        """Raise InputError if the model has no classes to guide to, or was never trained without classes."""
        check_guidance(guidance, self.num_classes, self.drops_labels)

    def take_over(self, description: Content, trains: bool) -> None:
        """Take over from a checkpoint whether its training hid some of the labels, and for sampling its class names.

        Args:
            description: the checkpoint's description of its model; empty if it has none.
            trains: whether the training goes on, with the `label_dropout` of this model.
        """
        before = description.get("options", {}).get("drops_labels", True)
        self.drops_labels = before or (trains and self.drops_labels)
        if not trains and "class_names" in description:
            name_classes(self._net, description["class_names"])

    def dropped(self, class_label: Tensor | None, *key: int) -> Tensor | None:
        """Replace labels (B,) by `NO_CLASS`, each with the probability `label_dropout`; `key` is that of the draws."""
        if class_label is None or not self.label_dropout:
            return class_label
        generator = keyed_generator(class_label.device, *key)
        draws = torch.rand(len(class_label), device=class_label.device, generator=generator)
        return class_label.masked_fill(draws < self.label_dropout, NO_CLASS)

    def of_samples(self, seeds: Sequence[int] | Tensor, device: torch.device) -> Tensor | None:
        """Draw the class of each sample, (B,) int64, from its seed alone; return None for an unconditional model."""
        if not self:
            return None
        chosen = self.chosen_class()
        if chosen is not None:
            return torch.full((len(seeds),), chosen, device=device)
        return seeded_classes(seeds, self.num_classes, device)
