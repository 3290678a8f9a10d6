"""Files of untrained networks, for runs that ask for a trained one."""

from pathlib import Path

import torch

from lit_knn.edm import LitEDM
from lit_knn.estimators import OneSample
from lit_knn.nets import UNet, network_from_config
from tests.edm_pickles import persistent, published, write


def write_published(path, image_size=32):
    """A small DDPM++ for RGB images as EDM publishes networks."""
    options = {"img_resolution": image_size, "label_dim": 0, "model_channels": 8, "channel_mult": [1, 1]}
    options |= {"num_blocks": 1, "attn_resolutions": []}
    net = network_from_config({"model_type": "SongUNet", "img_channels": 3, **options})
    inner = _persistent_tree(net, "SongUNet", kwargs={"in_channels": 3, "out_channels": 3, **options})
    outer = {"model_type": "SongUNet", "img_channels": 3, **options}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sigmas = {"sigma_min": 0, "sigma_max": float("inf"), "sigma_data": 0.5}
    return write(path, published(persistent("EDMPrecond", modules={"model": inner}, kwargs=outer, **sigmas)))


def _persistent_tree(module, name, **options):
    children = {child: _persistent_tree(part, type(part).__name__) for child, part in module.named_children()}
    own = (dict(tensors(recurse=False)) for tensors in (module.named_parameters, module.named_buffers))
    return persistent(name, *own, children, **options)


def write_own(path, channels=8, image_channels=1, seed=0):
    """A checkpoint of LitEDM with the U-Net of the digits, of other channels."""
    torch.manual_seed(seed)
    net = UNet(image_channels, channels=channels, multipliers=(1, 2), blocks=1)
    model = LitEDM(net, OneSample())
    for parameter in net.parameters():  # the last layer starts at zero
        torch.nn.init.normal_(parameter, std=0.05)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"sigma_data": 0.5}}, path)
    return path
