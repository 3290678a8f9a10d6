"""Writes files of untrained networks, for runs that need a trained one."""

from pathlib import Path

import torch

from lit_knn.common.checkpoint_file import MODEL_KEY
from lit_knn.nets import DDPMpp, UNet
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling import DiffusionModel
from tests.edm_pickles import edm_network, published, write


def small_published(family=DDPMpp, image_size=32, in_channels=3, channels=8, **options):
    """A small network of a published family with random weights."""
    torch.manual_seed(0)
    options = {
        "multipliers": [1, 1],
        "blocks": 1,
        "attention_at": [image_size // 2],
        "augment_dim": 9,
        **options,
    }
    net = family(image_size, in_channels, channels, **options)
    for parameter in net.parameters():  # the last layers start at or near zero
        torch.nn.init.normal_(parameter, std=0.05)
    return net


def write_published(path, net=None, use_fp16=False):
    """A network as EDM publishes it, by default a small DDPM++ for 32x32 RGB images."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, published(edm_network(net or small_published(), use_fp16)))


def write_start(path, net, sigma_data=0.5, image_shape=(1, 8, 8)):
    """A checkpoint of LitEDM that holds a network as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {f"denoiser.model.{name}": value.clone() for name, value in net.state_dict().items()}
    told = {
        **DiffusionModel(EDMPrecond(net, sigma_data), image_shape).description(),
        "prefix": "denoiser.model.",
    }
    torch.save({"state_dict": weights, MODEL_KEY: told}, path)
    return path


def write_own(path, channels=8, seed=0, augment_dim=0):
    """A checkpoint of LitEDM with the digits' U-Net, but another number of channels."""
    torch.manual_seed(seed)
    net = UNet(1, channels=channels, multipliers=(1, 2), blocks=1, augment_dim=augment_dim)
    for parameter in net.parameters():  # the last layer starts at zero
        torch.nn.init.normal_(parameter, std=0.05)
    return write_start(path, net)
