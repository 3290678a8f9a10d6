"""A reference set split over two GPUs, or two stand-ins, gives the results of the whole set on the CPU."""

import pytest
import torch
import torch.distributed as dist

from lit_knn.index import TorchIndex
from lit_knn.reference import ReferenceSet
from tests.gpu_sharded_probe import ON_GPUS, SETTINGS, answers
from tests.pretend_cuda import DeviceMismatch, world_of_nccl
from tests.pretend_cuda.tensor import active
from tests.ranks import run_ranks
from tests.sharded_probe import images

RANKS = 2
CPU = torch.device("cpu")


@pytest.mark.gpu
def test_shards_on_gpus_are_the_whole_set(tmp_path):
    if not active and torch.cuda.device_count() < RANKS:
        pytest.skip("NCCL needs one GPU for each rank")
    codes, errors = run_ranks("tests.gpu_sharded_probe", tmp_path, "nccl", RANKS)
    assert codes == [0] * RANKS, errors
    reports = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(RANKS)]
    for setting in SETTINGS:
        whole = ReferenceSet(images(setting), TorchIndex("float32"), hflip=setting == "mirrored")
        for rank, report in enumerate(reports):
            found = report[setting]
            for name, expected in answers(whole, setting, rank, CPU).items():
                # A GPU draws other numbers than a CPU and its stand-in, so that estimators without draws alone agree.
                if active or name not in ON_GPUS or name in ("Exact", "Switched", "Wiener"):
                    torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-3, msg=f"{setting} {name}")
                assert found[name].shape == expected.shape
        assert len({report[setting]["fingerprint"] for report in reports}) == 1


def test_nccl_on_the_stand_in_takes_tensors_of_the_device_alone(stand_in, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with world_of_nccl():
            dist.all_reduce(torch.ones(3, device="cuda"))
            with pytest.raises(DeviceMismatch, match="device type cpu"):
                dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
