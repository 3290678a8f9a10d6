"""Any two-dimensional model of the library `diffusers` as a network of this project. It needs the extra `hub`."""

import os
from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Literal

import diffusers
import torch
from torch import Tensor, nn

from lit_knn.common.errors import InputError, class_and_line, nearest
from lit_knn.common.memory import is_out_of_memory
from lit_knn.nets.base import NO_CLASS, labels_for


class Diffusers(nn.Module):
    """Wraps a model such as `diffusers.UNet2DModel` or `diffusers.DiTTransformer2DModel`.

    A model with more input than output channels gets the augmentation labels in the further channels, constant over
    the image: a mean flow needs 8 of them. Items without class get the number `null_class`. Where a model leaves out
    labels by chance in training, as `DiTTransformer2DModel` does, this is switched off, because the target must know
    which items have no class: use the option `label_dropout` of `model`.

    Args:
        model: name of the class in `diffusers`, `UNet2DModel` or `diffusers.UNet2DModel`, with `config`; or a folder
            that `save_pretrained` wrote, whose weights are the first weights.
        config: arguments of the class; `sample_size`, `in_channels` and so on.
        timestep: what the model gets as its timestep: `label`, the noise label ln(σ)/4 as it is; or `flow`,
            1000·σ/(1 + σ), the time of the straight path in thousandths, with which published flows were trained.
        num_classes: number of class labels, 0 for a model without classes.
        null_class: the model's number for "no class"; null for `num_classes`, the number after the last class.

    Raises:
        InputError: `diffusers` has no such class, or the model needs other inputs.
    """

    def __init__(
        self,
        model: str,
        config: Mapping[str, object] | None = None,
        timestep: Literal["label", "flow"] = "label",
        num_classes: int = 0,
        null_class: int | None = None,
    ) -> None:
        super().__init__()
        self.timestep = timestep
        self.num_classes = num_classes
        self.null_class = num_classes if null_class is None else null_class
        self.model = load_model(model, config)
        self.takes_classes = "class_labels" in signature(self.model.forward).parameters
        self._check_inputs(model)

        channels: dict[str, int] = dict(self.model.config)  # type: ignore[arg-type]
        self.in_channels = channels["out_channels"] or channels["in_channels"]
        self.augment_dim = channels["in_channels"] - self.in_channels
        if self.augment_dim < 0:
            raise InputError(
                f"Diffusers: {model} puts out {self.in_channels} channels for "
                f"{channels['in_channels']}, perhaps a learned sigma: set out_channels of config"
            )
        for layer in self.model.modules():
            if type(layer).__name__ == "LabelEmbedding":
                layer.dropout_prob = 0.0  # type: ignore[assignment]

    def _check_inputs(self, name: str) -> None:
        """Raise InputError if the model needs other inputs, or has not the embeddings of all classes.

        This sets `embeds_no_class`: whether the model also has an embedding for items without class.
        """
        self.embeds_no_class = True
        if self.num_classes and not self.takes_classes:
            raise InputError(
                f"Diffusers: {name} takes no class labels, but num_classes={self.num_classes}"
            )

        inputs = signature(self.model.forward).parameters
        needed = []
        # The first input is the image, whatever its name.
        for parameter in list(inputs.values())[1:]:
            if parameter.default is Parameter.empty and parameter.name != "timestep":
                needed.append(parameter.name)
        if "timestep" not in inputs or needed:
            lacks = f"needs {', '.join(needed)}" if needed else "takes no timestep"
            raise InputError(f"Diffusers: {name} {lacks}, so it is no model of images alone")

        if not hasattr(self.model, "class_embedding"):
            return
        embedding: object = self.model.class_embedding
        if embedding is not None and not self.num_classes:
            raise InputError(f"Diffusers: {name} embeds classes: set num_classes")
        rows = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 0
        if self.num_classes and (embedding is None or 0 < rows < self.num_classes):
            most = max(self.null_class, self.num_classes) + 1
            problem = f"{name} embeds {rows} classes, but num_classes={self.num_classes}"
            raise InputError(f"Diffusers: {problem}: set num_class_embeds of config to {most}")
        self.embeds_no_class = not 0 < rows <= self.null_class

    def forward(
        self,
        z_scaled: Tensor,
        noise_label: Tensor,
        class_label: Tensor | None = None,
        augment_label: Tensor | None = None,
    ) -> Tensor:
        """Map z_scaled (B, C, H, W), noise_label (B,) = ln(σ)/4 and class_label (B,) int to (B, C, H, W).

        `augment_label` is (B, augment_dim); None, like zeros, means that nothing was augmented.
        """
        shape = z_scaled.shape
        if shape[1] != self.in_channels:
            images = f"the images have the shape {tuple(shape[1:])}"
            raise InputError(f"Diffusers: the model has {self.in_channels} channels, but {images}")

        sample = z_scaled
        if self.augment_dim:
            if augment_label is None:
                augment_label = z_scaled.new_zeros(len(z_scaled), self.augment_dim)
            planes = augment_label.to(z_scaled.dtype)[:, :, None, None].expand(-1, -1, *shape[2:])
            sample = torch.cat([z_scaled, planes], dim=1)

        options: dict[str, Tensor] = {}
        class_label = labels_for(self, class_label, z_scaled)
        if self.num_classes and class_label is not None:
            # The look at the labels waits for a GPU, but few models lack the embedding.
            if not self.embeds_no_class and bool((class_label == NO_CLASS).any()):
                raise InputError(
                    f"Diffusers: an item has no class, but the model has no embedding of number {self.null_class}: "
                    f"set num_class_embeds of config to {self.null_class + 1}, or null_class"
                )
            options["class_labels"] = class_label.masked_fill(
                class_label == NO_CLASS, self.null_class
            )
        elif self.takes_classes and type(self.model).__name__ == "DiTTransformer2DModel":
            options["class_labels"] = torch.zeros(
                len(z_scaled), dtype=torch.long, device=z_scaled.device
            )

        result = self.model(
            sample, timestep=self.timesteps(noise_label), **options, return_dict=False
        )[0]
        if result.shape != shape:
            raise InputError(
                f"Diffusers: the model maps {tuple(shape)} to {tuple(result.shape)}; set out_channels of config to "
                f"{self.in_channels}, and sample_size to the side of the images"
            )
        return result

    def timesteps(self, noise_label: Tensor) -> Tensor:
        """Return what the model gets as its timestep, (B,), for noise labels ln(σ)/4, (B,)."""
        if self.timestep == "label":
            return noise_label
        # σ/(1 + σ) is the logistic function of ln σ.
        return 1000 * torch.sigmoid(4 * noise_label)

    def options(self) -> dict[str, object]:
        """Return the arguments that make this network again, as plain values; `config` is complete."""
        config: dict[str, object] = dict(self.model.config)  # type: ignore[arg-type]
        # The config also has notes of the library, and arguments that it has ignored.
        arguments = signature(type(self.model)).parameters
        return {
            "model": type(self.model).__name__,
            "config": {name: value for name, value in config.items() if name in arguments},
            "timestep": self.timestep,
            "num_classes": self.num_classes,
            "null_class": self.null_class,
        }

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as `diffusers` does; `from_pretrained` of its class reads the folder."""
        self.model.save_pretrained(folder)  # type: ignore[operator]


def load_model(name: str, config: Mapping[str, object] | None) -> nn.Module:
    """Return a new model of a class of `diffusers`, or that of a folder with its weights."""
    folder = Path(name).expanduser()
    if config is None and folder.is_dir():
        return diffusers.AutoModel.from_pretrained(str(folder))

    model_class = getattr(diffusers, name.removeprefix("diffusers."), None)
    if not isinstance(model_class, type) or not issubclass(model_class, diffusers.ModelMixin):
        if folder.is_dir():
            raise InputError(f"Diffusers: model={name} is a folder, which has a config: give none")
        raise InputError(
            f"Diffusers: model={name} is no class of diffusers and no folder of save_pretrained"
        )
    if config is None:
        raise InputError(f"Diffusers: model={name} needs config, the arguments of this class")
    _check_config(name, model_class, config)
    try:
        return model_class.from_config(dict(config))
    except Exception as error:  # Each class of the library checks its arguments in its own way.
        if is_out_of_memory(error):
            raise
        problem = f"Diffusers: {name} cannot be made of this config"
        raise InputError(f"{problem}: {class_and_line(error)}") from error


def _check_config(name: str, model_class: type, config: Mapping[str, object]) -> None:
    """Raise InputError for an argument that the class does not have. The library would ignore it."""
    arguments = signature(model_class).parameters
    # A complete config, as checkpoints store it, cannot lack what a misspelt argument was to set.
    if arguments.keys() <= config.keys():
        return
    for argument in map(str, config):
        # The library's notes in a file config.json begin with an underscore.
        if argument not in arguments and not argument.startswith("_"):
            problem = f"{name} has no argument {argument}"
            raise InputError(f"Diffusers: {problem}{nearest(argument, arguments)}")
