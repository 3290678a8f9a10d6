"""The base of modules whose network samples: image shape, samples, and what a checkpoint of them holds."""

from abc import abstractmethod
from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_knn.common.checkpoint_file import MODEL_KEY, Content
from lit_knn.common.errors import InputError
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.model_checks import check_architecture, try_noise_image
from lit_knn.nets.architecture import check_options
from lit_knn.sampling import GenerativeModel
from lit_knn.sampling.model_files import prefix_of


class SamplingModule(pl.LightningModule):
    """A Lightning module around a generative model.

    Subclasses implement `network`, `evaluate_network` and `generative_model`.

    Args:
        conditioning: says whether the network gets class labels.

    Attributes:
        image_shape: shape of one image; None until the data or a checkpoint gives it.
        images_seen: number of images of the training so far, over all ranks.
        loaded_step: number of optimiser steps of the loaded checkpoint, or of the last fit.
        guidance: weight of classifier-free guidance; 1 for none.
    """

    guidance: float = 1.0

    def __init__(self, conditioning: Conditioning) -> None:
        super().__init__()
        self.conditioning = conditioning
        self.image_shape: tuple[int, ...] | None = None
        self.images_seen = 0
        self.loaded_step = 0

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The raw network, without its preconditioning or its parameterisation."""

    @abstractmethod
    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the network at z (B, *shape) and noise level t = σ (B,); returns (B, *shape)."""

    @abstractmethod
    def generative_model(self) -> GenerativeModel:
        """Return the model that samples, in plain PyTorch; it shares the network of this module."""

    @property
    def step(self) -> int:
        """Number of optimiser steps taken. Outside a fit, it is that of the last fit or of the loaded checkpoint."""
        return self.trainer.global_step if self.trainer.state.fn == "fit" else self.loaded_step

    # The image shape

    def set_image_shape(self, shape: tuple[int, ...]) -> None:
        """Store the shape, and try the net on one image of noise."""
        self._check_image_shape(shape)
        lazy = [name for name, value in self.network.named_parameters() if is_lazy(value)]
        if lazy:
            # The average of the weights and the optimiser are made before a first pass.
            raise InputError(f"the net's {lazy[0]} is lazy: give the layer its sizes")
        device = next((parameter.device for parameter in self.parameters()), self.device)
        # In training mode batch norm would refuse one image, or count it in its statistics.
        training = [module for module in self.modules() if module.training]
        # Not `eval()`, because a module's own `train` may merge weights, and only `train` would take them apart.
        for module in training:
            module.training = False
        try:
            try_noise_image(self.evaluate_network, shape, device)
        finally:
            for module in training:
                module.training = True

    def _check_image_shape(self, shape: Sequence[int]) -> None:
        """Store the image shape. If both the data and a checkpoint give a shape, the two must be equal."""
        shape = tuple(shape)
        if self.image_shape not in (None, shape):
            raise InputError(
                f"the images of checkpoint and data differ in shape: {self.image_shape}, {shape}"
            )
        self.image_shape = shape

    def known_image_shape(self) -> tuple[int, ...]:
        """Return the shape of one image. Raises InputError if neither data nor a checkpoint gave the shape."""
        if self.image_shape is None:
            raise InputError(
                "sample: the image shape is not known before setup or a loaded checkpoint"
            )
        return self.image_shape

    # Samples

    def sample(self, seeds: Sequence[int] | Tensor, num_steps: int | None = None) -> Tensor:
        """Draw one image per seed: (B, *shape), float32, model space.

        Image i depends only on seeds[i], not on the batch. Its class is `sampling_class` or drawn from the seed.

        Args:
            seeds: (B,), non-negative integers.
            num_steps: sampling steps; None for the module's default.
        """
        return self.generative_model().sample(seeds, num_steps)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Draw samples for a batch of seeds (B,), in float32 with any `trainer.precision`, as all measurements do."""
        with torch.autocast(self.device.type, enabled=False):
            return self.sample(batch)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: Content) -> None:
        """Save what sampling needs, and the number of images seen."""
        # In a training a callback has already saved the images of whole batches, and this number stays.
        checkpoint.setdefault("images_seen", self.images_seen)
        checkpoint["image_shape"] = self.image_shape
        if self.image_shape is not None:
            model = self.generative_model()
            checkpoint[MODEL_KEY] = {**model.description(), "prefix": prefix_of(self, model.net)}

    def check_checkpoint(self, checkpoint: Content) -> None:
        """Check that the weights of a checkpoint mean the same in this module; nothing is loaded.

        Raises:
            InputError: the checkpoint is of another architecture; in subclasses, also of another parameterisation.
        """
        saved = checkpoint.get(MODEL_KEY, {})
        check_architecture(self.state_dict(), checkpoint.get("state_dict", {}), saved.get("kind"))
        check_options(self.network, saved.get("architecture"))

    def on_load_checkpoint(self, checkpoint: Content) -> None:
        """Load the counts and the image shape. Before that, `check_checkpoint` refuses weights that do not fit."""
        self.check_checkpoint(checkpoint)
        trains = self._trainer is not None and self.trainer.state.fn == "fit"
        self.conditioning.take_over(checkpoint.get(MODEL_KEY, {}), trains)
        self.conditioning.check_guidance(self.guidance)

        self.images_seen = checkpoint.get("images_seen", 0)
        self.loaded_step = checkpoint.get("global_step", 0)
        if checkpoint.get("image_shape") is not None:
            self._check_image_shape(checkpoint["image_shape"])
