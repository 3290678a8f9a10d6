"""`lit-knn plan` tells the memory of a run before it starts, as the run takes it, and tries one step."""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.plan_data import Memory, plan_data
from lit_knn.commands.plan_step import try_step
from lit_knn.commands.trainer import Trainer
from lit_knn.common.errors import InputError
from lit_knn.common.memory import process_bytes
from lit_knn.data import Arrays, Digits, PointsOnALine
from lit_knn.estimators import KNN, STF, SubspaceKNN, Switched
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.modules.estimator import LitEstimator
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import projection_of
from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY, refusal_of
from tests.image_files import refusal

CONFIGS = ROOT / "configs"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def plan_of(config, *args):
    """What each rank holds on the machine, by the first word, of a run on the CPU."""
    cli = make_cli(["-c", str(CONFIGS / config), "--trainer.accelerator", "cpu", *args], run=False)
    (memory,) = cli.trainer.plan(cli.model, cli.datamodule, one_step=False)
    return memory


def sizes(memory):
    return {name.partition(",")[0]: size for name, size in memory.sizes.items()}


def planned(estimator, data, device=CPU):
    """What lies on the device, and in the memory of the machine, for one estimator."""
    stored, trainer = data.stored(), Trainer(accelerator="cpu", logger=False)
    memories = plan_data(trainer, LitEstimator(estimator), data, stored, device)
    return sizes(memories[0]), sizes(memories[-1])


def test_ranks_shards_and_options_change_what_they_should(monkeypatch):
    two = plan_of("demo.yaml", "--trainer.devices", "2")
    assert two.needed == 2 * sum(size or 0 for size in two.sizes.values())
    options = ["--data.sharded", "true", "--trainer.strategy", "ddp", "--model.net.channels", "16"]
    parts = sizes(plan_of("table1/ict_knn.yaml", *options, "--trainer.devices", "4"))
    assert (parts["images"], parts["index"]) == (12_500 * 3072, 12_500 * 3072 * 4)
    # A draw of the images and the held-out ones stay; the index has those of the draw alone.
    parts = sizes(
        plan_of("table1/ict_knn.yaml", "--data.train_images", "2048", "--data.held_out", "100")
    )
    assert (parts["images"], parts["index"]) == (2148 * 3072, 2048 * 3072 * 4)
    parts = sizes(plan_of("table1/ict_knn.yaml", "--data.held_out", "100"))
    assert parts["index"] == 49_900 * 3072 * 4
    tangent = ["--model.estimator", "OneSample", "--model.tangent", "SubspaceKNN"]
    parts = sizes(plan_of("meanflow/digits.yaml", *tangent))
    assert any("coordinates" in name for name in parts)
    # Two machines have their own ranks. 1797 images are three shards of 449 and one of 450.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NODE_RANK", "0")
    plan = plan_of("demo.yaml", *options, "--trainer.devices", "2", "--trainer.num_nodes", "2")
    assert (plan.ranks, sizes(plan)["images"]) == (2, 450 * 64)


@pytest.mark.parametrize("factory", ["Flat", "IVF20,SQ8", "PCA16,IVF20,SQ8"])
def test_sizes_of_faiss_indexes_are_those_of_what_faiss_writes(factory, tmp_path):
    N, d = 3000, 48
    index = FaissIndex(factory, cache_dir=str(tmp_path))
    ReferenceSet(torch.randn(N, d), index=index).build_index()
    (file,) = tmp_path.glob("*.index")
    # The written index also has names, numbers and the quantisers' tables.
    assert index.memory(N, d)["index"] == pytest.approx(file.stat().st_size, rel=0.02, abs=8192)


@pytest.mark.parametrize("index", [TorchIndex(), SubspaceIndex(5, "float32")], ids=type)
def test_the_size_of_a_torch_index_is_that_of_what_is_pickled(index):
    before = len(pickle.dumps(index))
    ReferenceSet(torch.randint(256, (500, 3, 4, 4), dtype=torch.uint8), index=index).build_index()
    size = len(pickle.dumps(index)) - before
    assert index.memory(500, 48)["index"] == pytest.approx(size, abs=2000)


@pytest.mark.parametrize("hflip", [False, True])
def test_the_size_of_a_projection_is_that_of_its_tensors(hflip):
    data = Digits(hflip=hflip)
    estimator = SubspaceKNN(r=7, n=32, compute="float32")
    # Two estimators share the arrays of one name, and wrappers hold nothing.
    held, _ = planned(Switched(Switched(STF(4), estimator, 1.0), estimator, 2.0), data)
    assert "index" not in held
    (size,) = (size for name, size in held.items() if "coordinates" in name)
    data.setup()
    projection = projection_of(data.reference, 7)
    tensors = [projection.coordinates, projection.half_sq_norms, projection.components.basis]
    assert size == sum(t.numel() * t.element_size() for t in tensors)


class Unknown(STF):
    """An estimator of a user, who need not tell what it holds."""

    memory = None


def test_estimator_without_memory_is_not_known_and_may_search():
    Unknown.searches = True
    held, _ = planned(Unknown(4), Digits())
    assert held["Unknown"] is None
    assert held["index"] == 4 * 64 * 1797
    memory = Memory("the machine", 1e12, 1, {"Unknown": None})
    assert re.search("Unknown +NOT KNOWN", str(memory))
    assert "at least 0.00 GB, without what is not known, on the machine" in str(memory)


def test_index_memory_is_of_its_device_and_counts_where_built():
    for index, on_cpu in (
        (FaissIndex("Flat"), 4 * 64 * 1797),
        (TorchIndex(), None),
        (SubspaceIndex(8), None),
    ):
        data = Digits(index=index)
        held, machine = planned(KNN(8, 4), data, GPU)
        assert machine.get("index") == on_cpu
        assert held["index"] == index.memory(1797, 64)["index"]
        _, machine = planned(KNN(8, 4), data)
        assert machine["index"] == index.memory(1797, 64)["index"]
    for device, index in ((CPU, FaissIndex("Flat")), (GPU, TorchIndex())):  # The run names none.
        held, _ = planned(KNN(8, 4), Digits(), device)
        assert held["index"] == index.memory(1797, 64)["index"]
    # FAISS on a GPU finds fewer neighbours.
    data = Digits(index=FaissIndex("IVF4,SQ8"))
    with pytest.raises(InputError, match="k=1797: FAISS on a GPU finds at most 512"):
        planned(KNN(), data, GPU)


def test_classes_of_unsorted_data_count_as_copies(tmp_path):
    parts = sizes(plan_of("table2/digits_conditional.yaml"))
    assert parts["images copied by class"] == parts["images"] == 1797 * 64
    # With label dropout an index of all images joins those of the classes.
    both = plan_of("table2/digits_conditional.yaml", "--model.label_dropout", "0.1")
    assert sizes(both)["index"] == 2 * parts["index"]
    for i in range(4):
        (tmp_path / "in" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "in" / str(i % 2) / f"{i}.png")
    main(["prepare", str(tmp_path / "in"), str(tmp_path / "sorted.npy"), "--labels-from-folders"])
    prepared = (
        "--data",
        "Prepared",
        "--data.path",
        str(tmp_path / "sorted.npy"),
        "--data.batch_size",
        "4",
        "--model.estimator.k",
        "4",
    )
    for options in (prepared, ("--model.estimator", "estimators/one_sample.yaml")):
        assert "images copied by class" not in sizes(
            plan_of("table2/digits_conditional.yaml", *options)
        )


def test_ranks_of_a_machine_share_the_file_of_an_index(tmp_path):
    options = ["--trainer.devices", "2", "--data.index", "FaissIndex"]
    alone = plan_of("demo.yaml", *options)
    shared = plan_of("demo.yaml", *options, "--data.index.cache_dir", str(tmp_path))
    assert 2 * sizes(shared)["index"] == sizes(alone)["index"]
    assert not Memory("the machine", 29, 2, {"index": 10, "network": 5}).fits
    assert Memory("the machine", 30, 2, {"index": 10, "network": 5}).fits


def test_data_modules_know_size_before_loading_or_need_it(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 8, 6, 3), np.uint8))
    np.save(tmp_path / "b.npy", np.zeros((4, 5), np.float64))  # float32 in memory
    for data in (
        Digits(),
        PointsOnALine(num_points=9),
        *(Arrays(str(tmp_path / f"{name}.npy")) for name in "ab"),
    ):
        stored = data.stored()
        data.setup()
        assert stored.shape == tuple(data.reference.images.shape)
        assert stored.value_bytes == data.reference.images.element_size()
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 1, 8, 8), np.uint8))
    trainer, data = Trainer(accelerator="cpu", logger=False), Arrays(str(tmp_path / "a.npz"))
    model = make_cli(["-c", DEMO], run=False).model
    assert "--image_shape" in refusal(trainer.plan, model, data, 10)
    (memory,) = trainer.plan(model, data, 1000, [1, 8, 8], one_step=False)
    assert sizes(memory)["images"] == 64_000


# The command


def test_the_command_plans_and_starts_nothing(tmp_path, own_folder, capsys):
    main(["plan", "-c", DEMO, "--one_step", "false"])
    printed = capsys.readouterr().out
    assert re.search("network.* 0.014 GB\n +activations +NOT KNOWN", printed)
    assert ": fits" in printed
    # Plans for other data, or for another GPU.
    for options in (["--images", "2000000000"], ["--gpu_gb", "0.5"]):
        with pytest.raises(SystemExit) as caught:
            main(["plan", "-c", DEMO, "--one_step", "false", *options])
        assert caught.value.code == 1
        assert "DOES NOT FIT" in capsys.readouterr().out
    for number in ("0", "-5"):
        line = refusal_of(["plan", "-c", DEMO, "--images", number], capsys)
        assert f"images must be at least 1, got {number}" in line
    machines = ["--trainer.num_nodes", "2"]  # Without a launcher a fit would be refused.
    for options in ([], ["--trainer.accelerator", "gpu"], machines):
        main(["plan", "-c", DEMO, "--gpu_gb", "80", *options])
        assert "the machine, whose memory is not known" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "N"),
    [("celeba64", 202_599), pytest.param("imagenet64", 1_281_167, marks=pytest.mark.slow)],
)
def test_the_64x64_runs_are_planned_before_their_data_are_there(
    name, N, tmp_path, own_folder, capsys
):
    plan = ["plan", "-c", str(CONFIGS / name / "ict_knn.yaml"), "--trainer.accelerator", "cpu"]
    error = refusal_of(plan, capsys)
    assert error.startswith(f"error: plan: data.path=data/{name}.npy")
    assert "--images" in error
    lists = {"celeba64": 1788, "imagenet64": 4527}[name]
    papers = [
        "--data.index",
        "FaissIndex",
        "--data.index.factory",
        f"IVF{lists},SQ8",
        "--data.index.lossless",
        "true",
    ]
    main([*plan, "--images", str(N), "--image_shape", "[3,64,64]", "--gpu_gb", "80", *papers])
    printed = capsys.readouterr().out
    device, machine = printed.split("each device, which has 80.00 GB: fits")
    for where in (device, machine):
        size = float(re.search(r"  index +(\S+) GB", where)[1])
        # Each image takes its bytes and its number.
        assert size == pytest.approx((N * (12_288 + 8) + lists * 4 * 12_288) / 1e9, rel=1e-3)
    # The images are mapped from the disk, and copied to the device.
    for where, size in ((device, N * 12_288 / 1e9), (machine, 0)):
        assert f"  images, {N:,} x 3x64x64 " in where
        assert float(re.search(r"  images, .* (\S+) GB", where)[1]) == pytest.approx(size, rel=1e-3)
    assert re.search("work arrays of FAISS +1.611 GB", device)
    assert "the machine, whose memory is not known" in machine
    assert not list(tmp_path.iterdir())


def test_plan_refuses_what_a_fit_would_overwrite_alike(tmp_path, own_folder, capsys):
    main(["fit", "-c", DEMO, *TINY])
    before = sorted(tmp_path.rglob("*"))
    command = ["-c", DEMO, *TINY, "--trainer.logger.version", "knn_0"]
    line = refusal_of(["plan", *command], capsys)
    assert sorted(tmp_path.rglob("*")) == before
    assert "would overwrite it" in line
    assert refusal_of(["fit", *command], capsys) == line
    # The run's own file has options that only a training has.
    capsys.readouterr()
    config = "runs/demo/knn_0/config.yaml"
    main(["plan", "-c", config])
    assert "fits" in capsys.readouterr().out
    assert "plan has no option --weights_only" in refusal_of(
        ["plan", "-c", config, "--weights_only", "true"], capsys
    )


# One step


@pytest.fixture
def demo():
    return make_cli(["-c", DEMO, "--trainer.accelerator", "cpu"], run=False)


def test_peak_of_a_step_has_activations_of_its_batch(demo):
    few, many = (try_step(demo.trainer, demo.model, (B, 1, 8, 8)) for B in (16, 512))
    # The activations of each image hold more than 20 arrays of 32 channels of 8x8 pixels.
    assert many.peak - few.peak > 496 * 20 * 32 * 64 * 4
    assert many.seconds > 0


def test_class_conditional_step_is_tried_without_data():
    config = str(CONFIGS / "table2" / "digits_conditional.yaml")
    cli = make_cli(["-c", config, "--trainer.accelerator", "cpu"], run=False)
    assert try_step(cli.trainer, cli.model, (8, 1, 8, 8)).peak > 0


def test_a_step_larger_than_the_machine_is_refused_in_one_line(demo, monkeypatch):
    import lit_knn.commands.plan_step as module

    def check() -> None:
        line = refusal(try_step, demo.trainer, demo.model, (4096, 1, 8, 8))
        advice = "give a smaller --data.batch_size"
        assert line.startswith(f"one step of 4096 images does not fit: {advice}")

    with monkeypatch.context() as patched:
        patched.setattr(module, "machine_bytes", lambda: process_bytes("VmData") + 2**26)
        check()
    # Other processes use the rest.
    monkeypatch.setattr(module, "available_bytes", lambda: 2**26)
    check()


def test_a_plan_refuses_numbers_of_more_images_than_there_are(own_folder, capsys):
    line = refusal_of(["plan", "-c", DEMO, "--data.batch_size", "9999"], capsys)
    assert "data.batch_size=9999 on 1 device(s) needs 9999 images" in line
    line = refusal_of(["plan", "-c", DEMO, "--model.estimator.k", "9999"], capsys)
    assert "KNN: k=9999 is more than the 1797 images" in line


def test_plan_prints_memory_and_time_and_writes_nothing(tmp_path, own_folder, capsys):
    main(["plan", "-c", DEMO, "--data.batch_size", "4"])
    printed = capsys.readouterr().out
    assert re.search(r"^one step on this machine: peak 0\.\d+ GB, \S+ s$", printed, re.M)
    assert re.search(r"a step of 4 images +0\.\d+ GB", printed)
    assert "NOT KNOWN" not in printed
    assert not list(tmp_path.iterdir())
