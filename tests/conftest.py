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


@pytest.fixture(scope="session")
def random_weights(tmp_path_factory):
    """A file of random Inception weights."""
    from tests.inception import write_random_weights

    path = tmp_path_factory.mktemp("weights") / "random.pth"
    write_random_weights(path)
    return str(path)
