"""Weights for Inception V3 and pictures for it to look at, neither downloaded."""

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


def write_random_weights(path):
    """A weights file in torch-fidelity's layout, of no use but to compare two computations."""
    torch.save({}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
    torch.manual_seed(0)
    for module in network.modules():
        # Strong enough that pictures end in features that differ, and in logits of more than one class.
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    weight = network.fc.weight.data.normal_(std=2.0)
    with torch.no_grad():
        mean = network(blobs(4, seed=2))[0].mean(0)
    # Without what all pictures have in common, which would make one class of them.
    weight -= torch.outer(weight @ mean, mean) / mean.square().sum()
    torch.save(network.state_dict(), path)


def blobs(number, seed):
    """Colourful pictures that differ in more than noise, uint8 (number, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(number, 3, 3, 3, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic", align_corners=False)
    return (smooth.clamp(0, 1) * 255).round().to(torch.uint8)
