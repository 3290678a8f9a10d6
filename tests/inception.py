"""Weights for Inception V3 and input pictures; nothing is downloaded."""

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


def write_random_weights(path):
    """A weights file in torch-fidelity's layout; it serves only to compare two computations."""
    torch.save({}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        network = FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path)
        )
    torch.manual_seed(0)
    for module in network.modules():
        # The weights are so large that pictures get different features, and logits of more than one class.
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    weight = network.fc.weight.data.normal_(std=2.0)
    with torch.no_grad():
        mean = network(blobs(4, seed=2))[0].mean(0)
    # Remove the common part of all pictures; otherwise all would be in one class.
    weight -= torch.outer(weight @ mean, mean) / mean.square().sum()
    torch.save(network.state_dict(), path)


def blobs(number, seed):
    """Colourful, smooth and different pictures, uint8 (number, 3, 32, 32)."""
    coarse = torch.rand(number, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(
        coarse, size=(32, 32), mode="bicubic", align_corners=False
    )
    return (smooth.clamp(0, 1) * 255).round().to(torch.uint8)
