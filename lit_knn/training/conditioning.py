"""Checks the options and data of class-conditional training and sampling, and draws the class of each sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_knn.errors import InputError
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import seeded_classes


class Conditioning:
    """Says whether a model gets class labels, and checks that its network and its data allow this setting.

    Args:
        owner: name of the model, for messages.
        net: its network, or the `Network` that samples; it has `num_classes` if it knows classes.
        class_conditional: whether the model gets labels.
        sampling_class: class of all samples; None draws one for each seed.

    Attributes:
        num_classes: the network's number of classes, 0 if it is unconditional.

    Raises:
        InputError: `class_conditional` does not fit the network, or the network has no class `sampling_class`.
    """

    def __init__(self, owner: str, net: object, class_conditional: bool, sampling_class: int | None) -> None:
        num_classes = getattr(net, "num_classes", 0)
        if class_conditional != (num_classes > 0):
            raise InputError(
                f"{owner}: class_conditional={class_conditional}, but the net has num_classes={num_classes}"
            )
        if sampling_class is not None and not 0 <= sampling_class < num_classes:
            raise InputError(f"{owner}: sampling_class={sampling_class}, but the net has num_classes={num_classes}")
        self.owner = owner
        self.num_classes = num_classes
        self.sampling_class = sampling_class

    def __bool__(self) -> bool:
        return self.num_classes > 0

    def check_data(self, reference: ReferenceSet) -> None:
        """Raise InputError if the data has no labels, is sharded, or has a label that the network does not know."""
        if not self:
            return
        if reference.labels is None:
            raise InputError(f"{self.owner}: class_conditional=True, but the data has no labels")
        if reference.sharded:
            raise InputError(
                f"{self.owner}: class_conditional=True needs all images on each device: set data.sharded to false"
            )
        lowest, highest = map(int, reference.labels.aminmax())
        if lowest < 0 or highest >= self.num_classes:
            raise InputError(
                f"{self.owner}: the labels of the data are {lowest} to {highest}, but the net has "
                f"num_classes={self.num_classes}"
            )

    def labels(self, class_label: Tensor | None) -> Tensor | None:
        """Return the labels for network and estimator, (B,) int64, or None. Raises InputError if labels are missing."""
        if self and class_label is None:
            raise InputError(f"{self.owner}: class_conditional=True, but the batches have no labels")
        return class_label if self else None

    def of_samples(self, seeds: Sequence[int] | Tensor, device: torch.device) -> Tensor | None:
        """Draw the class of each sample, (B,) int64, from its seed alone; return None for an unconditional model."""
        if not self:
            return None
        if self.sampling_class is not None:
            return torch.full((len(seeds),), self.sampling_class, device=device)
        return seeded_classes(seeds, self.num_classes, device)
