"""`lit-knn plan` tells the memory of a run before it starts, as the run takes it, and refuses what a fit refuses."""

import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.plan import make_plan
from lit_knn.commands.plan_data import estimator_parts
from lit_knn.commands.plan_table import Part, Plan
from lit_knn.commands.trainer import Trainer
from lit_knn.data import Arrays, DataLayout, Digits, PointsOnALine
from lit_knn.estimators import KNN, STF, SubspaceKNN
from lit_knn.index import FaissIndex, SubspaceIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import projection_of
from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY, refusal_of
from tests.image_files import refusal

CONFIGS = ROOT / "configs"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAST = "runs/demo/knn_0/checkpoints/last.ckpt"


def plan_of(config, *args):
    cli = make_cli(["-c", str(CONFIGS / config), "--trainer.accelerator", "cpu", *args], run=False)
    return make_plan(cli.trainer, cli.model, cli.datamodule)


def parts_of(plan):
    return {part.name: part.bytes for part in plan.parts}


def test_networks_count_for_parameters_gradients_two_moments_and_an_average():
    parts, count = parts_of(plan_of("table1/ict_knn.yaml")), 56_395_523  # published for NCSN++
    assert parts["network"] == parts["gradients"] == parts["averaged weights"] == 4 * count
    assert parts["optimiser"] == 8 * count
    assert parts["images"] == 50_000 * 3072
    assert parts["index"] == 50_000 * 3072 * 4


def test_ranks_shards_and_options_change_what_they_should(monkeypatch):
    plain, weights = plan_of("demo.yaml"), 4 * 704_705
    lengths = [
        "--trainer.callbacks+",
        "lit_knn.callbacks.PowerAverages",
        "--trainer.callbacks.lengths",
        "[0.05, 0.1]",
    ]
    options = ["--trainer.precision", "bf16-mixed", "--optimizer", "SGD", "--optimizer.lr", "3e-3"]
    more = parts_of(plan_of("demo.yaml", *options, *lengths))
    added = {"program": more["program"], "optimiser": 0, "power-function averages": 2 * weights}
    assert more == parts_of(plain) | added
    two = plan_of("demo.yaml", "--trainer.devices", "2")
    assert parts_of(two)["gradient exchange"] == parts_of(two)["gradients"] == weights
    assert two.needed[0][1] == 2 * two.total
    options = ["--data.sharded", "true", "--trainer.strategy", "ddp", "--model.net.channels", "16"]
    parts = parts_of(plan_of("table1/ict_knn.yaml", *options, "--trainer.devices", "4"))
    assert (parts["images"], parts["index"]) == (12_500 * 3072, 12_500 * 3072 * 4)
    assert parts["order of an epoch"] == 2 * 50_000 * 8  # mirror images are items, too
    # A draw of the images and the held-out ones stay; the index has those of the draw alone.
    parts = parts_of(
        plan_of("table1/ict_knn.yaml", "--data.train_images", "2048", "--data.held_out", "100")
    )
    assert (parts["images"], parts["index"]) == (2148 * 3072, 2048 * 3072 * 4)
    assert (
        parts_of(plan_of("table1/ict_knn.yaml", "--data.held_out", "100"))["index"]
        == 49_900 * 3072 * 4
    )
    tangent = ["--model.estimator", "OneSample", "--model.tangent", "SubspaceKNN"]
    parts = parts_of(plan_of("meanflow/digits.yaml", *tangent))
    assert any("coordinates" in name for name in parts)
    # Two machines have their own ranks. 1797 images are three shards of 449 and one of 450.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NODE_RANK", "0")
    plan = plan_of("demo.yaml", *options, "--trainer.devices", "2", "--trainer.num_nodes", "2")
    assert (plan.ranks, parts_of(plan)["images"]) == (2, 450 * 64)


@pytest.mark.parametrize("factory", ["Flat", "IVF20,SQ8", "PCA16,IVF20,SQ8"])
def test_sizes_of_faiss_indexes_are_those_of_what_faiss_writes(factory, tmp_path):
    N, d = 3000, 48
    ReferenceSet(
        torch.randn(N, d), index=FaissIndex(factory, cache_dir=str(tmp_path))
    ).build_index()
    (file,) = tmp_path.glob("*.index")
    # The written index also has names, numbers and the quantisers' tables.
    assert FaissIndex(factory).nbytes(N, d, CPU) == pytest.approx(
        file.stat().st_size, rel=0.02, abs=8192
    )


@pytest.mark.parametrize("index", [TorchIndex(), SubspaceIndex(5, "float32")], ids=type)
def test_the_size_of_a_torch_index_is_that_of_what_is_pickled(index):
    before = len(pickle.dumps(index))
    ReferenceSet(torch.randint(256, (500, 3, 4, 4), dtype=torch.uint8), index=index).build_index()
    assert index.nbytes(500, 48, CPU) == pytest.approx(len(pickle.dumps(index)) - before, abs=2000)


@pytest.mark.parametrize("hflip", [False, True])
def test_the_size_of_a_projection_is_that_of_its_tensors(hflip):
    data = Digits(hflip=hflip)
    estimator = SubspaceKNN(r=7, n=32, compute="float32")
    # Two estimators share the arrays of one name.
    held, _ = estimator_parts([STF(4), estimator, estimator], data, data.stored(), CPU)
    (part,) = (p for p in held if "coordinates" in p.name)
    data.setup()
    projection = projection_of(data.reference, 7)
    tensors = [projection.coordinates, projection.half_sq_norms, projection.components.basis]
    assert part.bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_an_index_is_that_of_its_device_and_counts_where_it_is_built():
    for index, on_cpu in (
        (FaissIndex("Flat"), 4 * 64 * 1797),
        (TorchIndex(), 0),
        (SubspaceIndex(8), 0),
    ):
        data = Digits(index=index)
        held, building = estimator_parts([KNN(8, 4)], data, data.stored(), GPU)
        assert building[0].bytes == on_cpu
        assert held[0].bytes > 0
        _, building = estimator_parts([KNN(8, 4)], data, data.stored(), CPU)
        assert building[0].bytes == index.nbytes(1797, 64, CPU)
    for device, index in ((CPU, FaissIndex("Flat")), (GPU, TorchIndex())):  # The run names none.
        (held, *_), _ = estimator_parts([KNN(8, 4)], Digits(), Digits().stored(), device)
        assert (held.bytes, held.note.split()[0]) == (
            index.nbytes(1797, 64, device),
            type(index).__name__,
        )


def test_classes_of_unsorted_data_count_as_copies(tmp_path):
    parts = parts_of(plan_of("table2/digits_conditional.yaml"))
    # With label dropout an index of all images joins those of the classes.
    both = plan_of("table2/digits_conditional.yaml", "--model.label_dropout", "0.1")
    assert [part.bytes for part in both.parts if part.name == "index"] == [parts["index"]] * 2
    assert parts["images by class"] == parts["images"] == 1797 * 64
    for i in range(4):
        (tmp_path / "in" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "in" / str(i % 2) / f"{i}.png")
    main(["prepare", str(tmp_path / "in"), str(tmp_path / "sorted.npy"), "--labels-from-folders"])
    prepared = (
        "--data",
        "Prepared",
        "--data.path",
        str(tmp_path / "sorted.npy"),
        "--model.estimator.k",
        "4",
    )
    for options in (prepared, ("--model.estimator", "estimators/one_sample.yaml")):
        assert "images by class" not in parts_of(
            plan_of("table2/digits_conditional.yaml", *options)
        )


def test_ranks_of_a_machine_hold_a_shared_part_once():
    parts = [Part("index", 10, shared=True), Part("network", 5)]
    (machine,) = Plan(CPU, parts, [], None, 29, ranks=4).needed
    assert machine == ("the machine", 10 + 4 * 5, 29)
    device, host = Plan(GPU, parts, parts, 15, 30, ranks=4).needed
    assert (device, host) == (("each device", 15, 15), ("the machine", 30, 30))
    assert not Plan(CPU, parts, [], None, 29, ranks=4).fits
    assert Plan(GPU, parts, parts, 15, 30, ranks=4).fits


def test_data_modules_know_their_size_before_they_load_or_need_it_given(tmp_path):
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
    assert not DataLayout((1, 1)).mapped
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 1, 8, 8), np.uint8))
    trainer, data = Trainer(accelerator="cpu", logger=False), Arrays(str(tmp_path / "a.npz"))
    model = make_cli(["-c", DEMO], run=False).model
    assert "--image_shape" in refusal(make_plan, trainer, model, data, 10)
    assert parts_of(make_plan(trainer, model, data, 1000, [1, 8, 8]))["images"] == 64_000


# The command


def test_the_command_plans_and_starts_nothing(tmp_path, own_folder, capsys):
    main(["plan", "-c", DEMO])
    printed = capsys.readouterr().out
    assert "704,705 parameters" in printed
    assert ": fits" in printed
    assert "Not counted: activations" in printed
    # Plans for other data, or for another GPU.
    for options in (["--images", "2000000000"], ["--gpu_gb", "0.5"]):
        with pytest.raises(SystemExit) as caught:
            main(["plan", "-c", DEMO, *options])
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
    size = float(re.search(r"  index +(\S+) GB", printed)[1])
    assert all(f"\n  {part} " in printed for part in ("network", "gradients", "optimiser"))
    assert "on a GPU of 80 GB that is given, not found here" in printed
    assert f"{N:,} x 3x64x64 uint8, copied to the device" in printed
    assert "mapped from the disk" in printed
    # Each image takes its bytes and its number, and FAISS reserves 1.5 GiB.
    assert size == pytest.approx(
        (N * (12_288 + 8) + lists * 4 * 12_288 + 1.5 * 2**30) / 1e9, rel=1e-3
    )
    assert ": fits" in printed
    assert not list(tmp_path.iterdir())


GRID = "trainer: {callbacks: [{class_path: lit_knn.callbacks.SampleGrid, init_args: {num_steps: [3]}}]}"
ONE_CYCLE = "--lr_scheduler OneCycleLR --lr_scheduler.max_lr 0.003 --lr_scheduler.total_steps 9 --trainer.max_steps 10"
RESUMED = f"--ckpt_path {LAST}"
CLASSES = f"-c {CONFIGS}/table2/digits_conditional.yaml -c tiny.yaml"
REFUSED = [
    ("--data.batch_size 2000", "needs 2000 images"),
    ("--data Arrays --data.path images.npy", "the images have the shape (3, 8, 8)"),
    ("--model.estimator PCALocality --data.sharded true", "PCALocality needs the whole reference set"),
    (f"{CLASSES} --model.estimator.k 1000", "class 0: KNN: k=1000"),
    ("-c grid.yaml", "SampleGrid: num_steps=3"),
    (f"{ONE_CYCLE} --optimizer RAdam --optimizer.lr 0.003", "OneCycleLR would end before the 10 steps"),
    ("--trainer.logger.version knn_0", "would overwrite it"),
    (f"{RESUMED} --data.held_out 9 --trainer.max_steps 2", "number of images of the data 1797, not 1788"),
    (f"{RESUMED} --trainer.max_steps 2 --optimizer SGD --optimizer.lr 0.003", "the state of optimizer RAdam"),
]  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        main(["fit", "-c", DEMO, *TINY])
        np.save("images.npy", np.zeros((40, 8, 8, 3), np.uint8))
        for name, text in {"grid": GRID, "tiny": "data: {init_args: {batch_size: 32}}"}.items():
            (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[options for options, _ in REFUSED])
def test_a_plan_refuses_what_a_fit_refuses_in_the_same_words(
    options, message, planned, monkeypatch, capsys
):
    monkeypatch.chdir(planned)
    before = sorted(planned.rglob("*"))
    command = ["-c", DEMO, *TINY, *options.split()]
    line = refusal_of(["plan", *command], capsys)
    assert sorted(planned.rglob("*")) == before
    assert message in line
    assert refusal_of(["fit", *command], capsys) == line
