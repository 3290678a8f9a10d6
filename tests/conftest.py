import warnings

import pytest
import torch

TINY_UNET = {"in_channels": 1, "channels": 8, "multipliers": [1, 2], "blocks": 1}


@pytest.fixture(autouse=True)
def _quiet_and_deterministic():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        yield
