"""`load`: the model of a run, a checkpoint, an exported folder or a published file."""

import os
from pathlib import Path

from torch import nn

from lit_knn.checkpoint_file import MODEL_KEY, read_checkpoint_file
from lit_knn.edm_checkpoint import denoiser_of, load_network, load_network_parts
from lit_knn.errors import prefixed
from lit_knn.generative_models import DiffusionModel, FlowModel, GenerativeModel
from lit_knn.hand_over.checkpoints import read_checkpoint_parts
from lit_knn.hand_over.exported import FORMAT, WEIGHTS_NAME, metadata_of, read_exported
from lit_knn.hand_over.parts import build
from lit_knn.nets.flow import FlowDenoiser
from lit_knn.nets.precond import EDMPrecond
from lit_knn.run_folder import last_checkpoint
from lit_knn.schedules import NoiseGrid


def load(path: str | os.PathLike[str], net: nn.Module | None = None) -> GenerativeModel:
    """Load a trained model for sampling, in plain PyTorch. No code of a file is run.

    Args:
        path: the folder of a training run (its `checkpoints/last.ckpt`, or else the kept checkpoint of the most
            images); a `.ckpt`; a folder that `lit-knn export` wrote, or its `.safetensors`; a published EDM
            `.pkl`, or the `.safetensors` that was converted from it. Of a checkpoint the averaged weights are used.
        net: the raw network, for a file of a network that is not from `lit_knn.nets`; its weights are replaced.

    Returns:
        The model, on the CPU, in evaluation mode, without gradients; `sample(seeds)` draws images.

    Raises:
        InputError: the file is missing, damaged or of another kind; its values are impossible or do not fit together;
            it does not tell the architecture of its network, and `net` is None.
    """
    file = find_file(path)
    if file.suffix == ".ckpt":
        parts = read_checkpoint_parts(file)
    elif file.suffix == ".safetensors" and metadata_of(file).get("format") == FORMAT:
        parts = read_exported(file)
    else:
        return _published(file, net)
    with prefixed(os.fspath(file)):
        return build(parts, net)


def load_denoiser(
    path: str | os.PathLike[str], net: nn.Module | None = None, fp16: bool = False
) -> EDMPrecond | FlowDenoiser:
    """Make the denoiser D(z, σ) of a network file: one that `load_network` reads, or a checkpoint of `LitFlow`.

    Args:
        path: the file.
        net: the architecture, for a `.ckpt` that does not store it; its weights are replaced.
        fp16: compute the network in float16.

    Raises:
        InputError: as `load_network`, or as `load`.
    """
    if Path(path).suffix == ".ckpt" and Path(path).is_file():
        told = read_checkpoint_file(path, mmap=True).get(MODEL_KEY)
        if isinstance(told, dict) and told.get("kind") == FlowModel.kind:
            model = load(path, net)
            assert isinstance(model, FlowModel)
            return FlowDenoiser(model.network, fp16).eval()
    return load_network(path, net, fp16)


def find_file(path: str | os.PathLike[str]) -> Path:
    """Return the file with the weights: `path` itself, or the one that stands for the folder `path`."""
    path = Path(path)
    if not path.is_dir():
        return path
    exported = path / WEIGHTS_NAME
    return exported if exported.is_file() else last_checkpoint(path)


def _published(path: Path, net: nn.Module | None) -> DiffusionModel:
    """Load an EDM network, published or converted. EDM's sampler stays within the noise levels of the network."""
    config, weights = load_network_parts(path)
    denoiser = denoiser_of(path, config, weights, net, fp16=False)
    with prefixed(os.fspath(path)):
        shape = (config["img_channels"], config["img_resolution"], config["img_resolution"])
        usual = NoiseGrid()
        lowest = max(usual.sigma_min, config.get("sigma_min", 0.0))
        highest = min(usual.sigma_max, config.get("sigma_max", usual.sigma_max))
        model = DiffusionModel(
            denoiser, shape, NoiseGrid(lowest, highest), drops_labels=config.get("label_dropout", 0) > 0
        )
        return model.eval().requires_grad_(False)
