import warnings

import pytest
import torch

# Tensors in tests are tiny: a second thread costs more in waiting than it brings.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quiet_and_deterministic():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        yield
