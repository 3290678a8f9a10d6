"""A reference set split over two GPUs, or two stand-ins, gives the results of the whole set on the CPU."""

import pytest
import torch

from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from tests.gpu_sharded_probe import SETTINGS, means
from tests.pretend_cuda import PretendTensor
from tests.ranks import run_ranks
from tests.sharded_probe import images, latents

RANKS = 2
CPU = torch.device("cpu")

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    if 0 < torch.cuda.device_count() < RANKS:
        pytest.skip("NCCL needs one GPU for each rank")
    folder = tmp_path_factory.mktemp("sharded")
    codes, errors = run_ranks("tests.gpu_sharded_probe", folder, "nccl", RANKS)
    assert codes == [0] * RANKS, errors
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_shards_on_gpus_are_the_whole_set(reports, setting):
    whole = ReferenceSet(images(setting), TorchIndex("float32"), hflip=setting == "mirrored")
    sq_dist, ids = whole.search(latents(setting, 0)[0], 7)
    everything = whole.gather(torch.arange(whole.N))
    stand_in = isinstance(torch.empty(0, device="cuda"), PretendTensor)
    for rank, report in enumerate(reports):
        seen = report[setting]
        torch.testing.assert_close(seen["found"][0], sq_dist, rtol=1e-3, atol=1e-3)
        assert torch.equal(seen["found"][1], ids)
        assert torch.equal(seen["images"], everything)
        assert seen["located"].tolist() == [5, 6, 7, 8]
        torch.testing.assert_close(seen["mean"], whole.mean())
        for name, mean in means(whole, setting, rank, CPU).items():
            assert len(mean) == (0 if rank == 1 else 3)
            # A real GPU draws other numbers than the CPU and its stand-in.
            if stand_in or name in ("Exact", "Switched", "Wiener"):
                torch.testing.assert_close(seen["means"][name], mean, rtol=1e-3, atol=1e-3, msg=name)
    assert len({report[setting]["fingerprint"] for report in reports}) == 1
