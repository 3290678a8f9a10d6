"""Files of untrained networks, for runs that ask for a trained one."""

from pathlib import Path

import torch

from lit_knn.edm import LitEDM
from lit_knn.estimators import OneSample
from lit_knn.nets import UNet


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
