"""Loads, writes and converts files of trained models, in plain PyTorch. No code of a file runs.

`lit-knn convert in.pkl out.safetensors` converts a published EDM pickle.
"""

import os
from pathlib import Path

from torch import Tensor, nn

from lit_knn.common.errors import InputError, prefixed, reading
from lit_knn.nets.flow import FlowDenoiser
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.sampling import DiffusionModel, GenerativeModel, MeanFlowModel
from lit_knn.sampling.building import build
from lit_knn.sampling.denoising_model import DenoisingModel
from lit_knn.sampling.described_parts import ModelDescription
from lit_knn.sampling.model_files import find_file, read_model_file, write_exported

# Layers for augmentation labels, in the published networks and in `UNet`. They have no bias, so
# without labels they add nothing.
AUGMENTATION_WEIGHTS = ("map_augment.weight", "embedding.augmentation.weight")


def load(path: str | os.PathLike[str], net: nn.Module | None = None) -> GenerativeModel:
    """Load a trained model for sampling, in plain PyTorch. No code of a file is run.

    Args:
        path: the folder of a training run (its `checkpoints/last.ckpt`, or else the kept checkpoint of the most
            images); a `.ckpt`; a folder that `lit-knn export` wrote, or its `.safetensors`; a published EDM
            `.pkl`, or the `.safetensors` that was converted from it. A checkpoint gives its averaged weights.
            `hf://user/name`, or `hf://user/name@revision`, is an exported model on the Hugging Face Hub.
        net: the raw network, if the file's network is not from `lit_knn.nets`; its weights are replaced.

    Returns:
        The model, on the CPU, in evaluation mode, without gradients; `sample(seeds)` draws images. Without `net`, its
        weights are float32.
    """
    file = find_file(path)
    description, weights = read_model_file(file)
    with prefixed(os.fspath(file)), reading("the model"):
        return build(description, weights, net)


def load_network(
    path: str | os.PathLike[str], net: nn.Module | None = None, fp16: bool = False
) -> EDMPrecond | FlowDenoiser:
    """Load only the denoiser D(z, σ) of a diffusion or flow model.

    Args:
        path: see `load`.
        net: see `load`.
        fp16: compute in float16, except the embedding, as EDM's own code does on GPUs for files with `use_fp16`. The
            weights stay in float32.

    Returns:
        `denoiser(z, sigma, class_label=None)`, on the CPU, in evaluation mode, without gradients.
    """
    model = _model(path, net)
    denoiser = _denoiser_of(model, path)
    denoiser.fp16 = fp16
    denoiser.drops_labels = model.drops_labels
    return denoiser.eval()


def load_model_to_tune(
    path: str | os.PathLike[str], net: nn.Module | None = None
) -> GenerativeModel:
    """Load a model for more training, without the layer for augmentation labels, except of a mean flow.

    Without augmentation this layer would never get a gradient, which distributed training refuses. A mean flow has its
    times there.

    Args:
        path: see `load`.
        net: a network of the architecture, for instance with another dropout. It gets the file's weights, and its
            frozen parameters stay frozen. None builds the network that the file describes.

    Returns:
        The model, on the CPU, in training mode, with gradients.
    """
    frozen = set()
    if net is not None:
        frozen = {name for name, value in net.named_parameters() if not value.requires_grad}

    model = _model(path, net, augmented=False)
    for name, value in model.net.named_parameters():
        value.requires_grad_(name not in frozen)
    return model.train()


def load_network_to_tune(
    path: str | os.PathLike[str], net: nn.Module | None = None, consistency: bool = False
) -> tuple[nn.Module, float]:
    """Load the raw network of a diffusion model for more training; see `load_model_to_tune`.

    Args:
        path: see `load`.
        net: see `load_model_to_tune`.
        consistency: accept also a consistency model.

    Returns:
        The network, on the CPU, in training mode, with gradients, and the sigma_data of its preconditioning.
    """
    model = load_model_to_tune(path, net)
    function = model.network
    can_be_tuned = (EDMPrecond, ConsistencyFunction) if consistency else EDMPrecond
    if not isinstance(function, can_be_tuned):
        kinds = "a diffusion or a consistency model" if consistency else "a diffusion model"
        problem = f"a {model.kind} model cannot be tuned here: give {kinds}"
        raise InputError(f"{os.fspath(find_file(path))}: {problem}")
    return model.net, function.sigma_data


def _denoiser_of(model: GenerativeModel, path: str | os.PathLike[str]) -> EDMPrecond | FlowDenoiser:
    """Return the denoiser of a model. Raises InputError with the path of its file if it has none."""
    if not isinstance(model, DenoisingModel):
        problem = f"a {model.kind} model has no denoiser: give a diffusion or a flow model"
        raise InputError(f"{os.fspath(find_file(path))}: {problem}")
    return model.denoiser


def _model(
    path: str | os.PathLike[str], net: nn.Module | None, augmented: bool = True
) -> GenerativeModel:
    """Load a model for its network alone; `augmented=False` omits the layer for augmentation labels."""
    file = find_file(path)
    description, weights = read_model_file(file)
    with prefixed(os.fspath(file)), reading("the model"):
        if description["kind"] == DiffusionModel.kind:
            # A file with a user's own process would be refused, but only the sampler needs the process.
            description["options"]["process"] = None
        if not augmented and description["kind"] != MeanFlowModel.kind:
            _omit_augmentation(description, weights)
        return build(description, weights, net)


def _omit_augmentation(description: ModelDescription, weights: dict[str, Tensor]) -> None:
    """Take the layer for augmentation labels out of the content of a file, if the network has one."""
    for name in AUGMENTATION_WEIGHTS:
        weights.pop(name, None)

    architecture = description.get("architecture")
    if architecture is not None and "augment_dim" in architecture["options"]:
        architecture["options"]["augment_dim"] = 0


def convert(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> GenerativeModel:
    """Convert a published EDM pickle to safetensors, with float32 weights; an existing file is never replaced.

    Returns the model that was written.
    """
    out_path = Path(out_path).expanduser()
    if out_path.suffix != ".safetensors":
        raise InputError(f"{out_path}: the output must be named .safetensors")
    if out_path.exists():
        raise InputError(f"{out_path} exists already, and is not replaced")

    model = load(in_path)
    write_exported(out_path, model)
    return model
