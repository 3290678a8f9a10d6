"""`lit_knn.load` gives the network of any run for sampling in plain PyTorch, and runs nothing of a file."""

import json
import subprocess
import sys
from functools import partial, reduce
from operator import getitem

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import lit_knn
from lit_knn.commands.export import export
from lit_knn.common.errors import InputError
from lit_knn.common.pixels import to_uint8
from lit_knn.common.tables import read_rows
from lit_knn.estimators import Network, OneSample
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT, LitMeanFlow
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.time_distributions import LogitNormalTimes
from lit_knn.nets import ADM, DDPMpp, DiT, NCSNpp, UNet
from lit_knn.nets.flow import DataOutput, EDMOutput, VelocityOutput
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling import DiffusionModel, FlowModel
from lit_knn.sampling.building import build
from lit_knn.sampling.flow_times import FixedSteps, TimeSpan
from lit_knn.sampling.loading import convert, load_network
from lit_knn.sampling.model_files import write_exported
from lit_knn.sampling.noise_grid import NoiseGrid
from lit_knn.sampling.samplers import heun_sampler, seeded_noise
from lit_knn.sampling.solvers import euler_step
from main import main
from tests.command_lines import DEMO, ROOT, TINY, refusal_of
from tests.image_files import encoded, pixels, write_zip
from tests.networks import small_published, write_published
from tests.trained_runs import CONFIGS, last, leave_run

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
MODULES = {"ict": LitICT, "edm": LitEDM, "ect": LitECT, "flow": LitFlow, "mean_flow": LitMeanFlow}
OWN_STEPS = {"ict": 1, "edm": 18, "ect": 1, "flow": 18, "mean_flow": 1}
SEEDS = range(5)
TOLD = "generative_model"
LABELS = {"edm": 9, "flow": 9, "mean_flow": 8}  # of augmentations, or of the second time


@pytest.fixture(scope="module")
def runs(tmp_path_factory, trained_run):
    """A run of each kind, with and without classes: its folder, its command-line options, its exported folder."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for kind in CONFIGS:
        run, options = trained_run(kind)
        export(run, root / f"exported_{kind}")
        found[kind] = (run, options, root / f"exported_{kind}")
    return found


def module_of(kind, run):
    """The Lightning module with the run's weights, as `predict` makes it."""
    classes = 10 if kind.endswith("_classes") else 0
    net = UNet(
        1,
        channels=8,
        multipliers=(1, 2),
        blocks=1,
        num_classes=classes,
        augment_dim=LABELS.get(kind, 0),
    )
    more = {"augmentation": GeometricAugmentation()} if LABELS.get(kind) == 9 else {}
    more |= {"start": str(last(run.parent.parent / "edm" / "knn_0"))} if kind == "ect" else {}
    module = MODULES[kind.removesuffix("_classes")]
    return module.load_from_checkpoint(last(run), net=net, estimator=OneSample(), **more).eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_run_checkpoint_and_export_sample_the_same_bits(kind, runs):
    run, _, exported = runs[kind]
    own, module = OWN_STEPS[kind.removesuffix("_classes")], module_of(kind, run)
    expected, of_two_steps = module.sample(SEEDS), module.sample(SEEDS, 2)
    for images in (expected, of_two_steps):
        assert images.dtype == torch.float32
        assert images.isfinite().all()
        assert images.std() > 0.01
    assert not torch.equal(expected, of_two_steps)
    assert torch.equal(lit_knn.load(exported).sample(SEEDS, own), expected)
    for model in map(lit_knn.load, (run, last(run), exported, exported / "model.safetensors")):
        assert model.num_steps == own
        assert torch.equal(model.sample(SEEDS, 2), of_two_steps)
        assert not any(part.training for part in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
    stored = torch.load(last(run), weights_only=True)
    weights = load_file(exported / "model.safetensors")
    named = {stored[TOLD]["prefix"] + name: value for name, value in weights.items()}
    assert named.keys() == stored["state_dict"].keys()
    assert all(torch.equal(stored["state_dict"][name], value) for name, value in named.items())


@pytest.mark.parametrize("kind", ["ict_classes", "edm_classes"])
def test_a_class_is_chosen_or_drawn_from_the_seed(kind, runs):
    model = lit_knn.load(runs[kind][0])
    assert model.num_classes == 10
    drawn = model.sample(SEEDS, 2)
    each = torch.stack([model.sample(SEEDS, 2, class_label=label) for label in range(10)])
    # An item's image is the image of one of the classes, and batches of any classes give the same images.
    chosen = [
        next(label for label in range(10) if torch.equal(each[label, i], drawn[i]))
        for i in range(len(SEEDS))
    ]
    assert len(set(chosen)) > 1
    assert torch.equal(model.sample(SEEDS, 2, chosen), drawn)
    assert torch.equal(model.sample(SEEDS, 2, torch.tensor(chosen)), drawn)
    assert torch.equal(model.sample(SEEDS, np.int64(2), chosen), drawn)
    z = seeded_noise(range(3), model.image_shape)
    expected = model(z, 1.0, torch.tensor([4, 4, 4]))
    assert all(
        torch.equal(model(z, 1.0, label), expected) for label in (4, [4, 4, 4], torch.tensor(4))
    )
    assert torch.equal(model(z, 1.0, -1), model(z, 1.0))
    # Sums of one row may round differently.
    torch.testing.assert_close(
        model.sample([3], 2), drawn[3:4], rtol=0, atol=1e-5 * float(drawn.abs().max())
    )
    for label in (10, -1, True, [0, 1, 2, 3, 10], torch.zeros(5)):
        with pytest.raises(InputError, match="class_label"):
            model.sample(SEEDS, class_label=label)


def test_the_name_of_a_folder_is_a_class_from_prepare_to_sample(tmp_path, capsys):
    files = {
        f"{name}/{i}.png": encoded(pixels(8, 8)) for name in ("tower", "01", "1") for i in range(8)
    }
    data, exported = str(tmp_path / "places.npy"), tmp_path / "exported"
    main(["prepare", str(write_zip(tmp_path / "places.zip", files)), data, "--labels-from-folders"])
    more = [
        "--data",
        "Prepared",
        "--data.path",
        data,
        "--data.batch_size",
        "8",
        "--model.estimator.k",
        "8",
    ]
    more += ["--model.net.num_classes", "3", "--trainer.callbacks", "[]"]
    run, options = leave_run(tmp_path / "runs", "edm_classes", *more)
    main(["export", str(run), str(exported)])
    for model in map(lit_knn.load, (run, exported)):
        assert model.class_names == ["01", "1", "tower"]
        expected = model.sample(SEEDS, 2, class_label=2)
        assert not torch.equal(model.sample(SEEDS, 2, class_label=0), expected)
        assert torch.equal(model.sample(SEEDS, 2, class_label="tower"), expected)
        mixed = model.sample(SEEDS, 2, ["tower", "01", 2, "1", 0])
        assert torch.equal(mixed, model.sample(SEEDS, 2, [2, 0, 2, 1, 0]))
        with pytest.raises(
            InputError, match=r"class_label='Tower' is no class; did you mean tower\?"
        ):
            model.sample(SEEDS, class_label="Tower")
    few = ["--data.predict_samples", "5", "--trainer.logger", "false", "--sample_writer.folder"]
    options += ["--ckpt_path", str(last(run)), *few]
    published = [
        "--model",
        "LitEstimator",
        "--model.estimator",
        "Network",
        "--model.estimator.path",
        str(exported),
    ]
    published += ["--data", "Prepared", "--data.path", data, "--trainer.accelerator", "cpu", *few]
    in_file = tmp_path / "chosen.yaml"
    in_file.write_text("model: {init_args: {sampling_class: 01}}")  # YAML's number 1
    names = [f"{seed:06d}.png" for seed in SEEDS]
    for label, name, given in (
        (2, "tower", [*options, str(tmp_path / "tower"), "--model.sampling_class", "tower"]),
        (1, "1", [*published, str(tmp_path / "1"), "--model.sampling_class", "1"]),
        (0, "01", [*options, str(tmp_path / "01"), "-c", str(in_file)]),
    ):
        main(["predict", *given])
        rows = read_rows(tmp_path / name / "classes.csv")
        assert rows == [{"file": file, "class": str(label), "name": name} for file in names]
        # The pictures are the images of the library.
        images = to_uint8(lit_knn.load(exported).sample(SEEDS, class_label=name)).squeeze(1).numpy()
        files = [np.array(Image.open(tmp_path / name / file)) for file in names]
        assert np.array_equal(np.stack(files), images)
    capsys.readouterr()
    line = refusal_of(
        ["predict", *options, str(tmp_path / "bad"), "--model.sampling_class", "towr"], capsys
    )
    assert "sampling_class='towr' is no class; did you mean tower?" in line


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        (
            "ict",
            lambda model, z: model.sample([0], class_label=0),
            "class_label=0, but the net has num_classes=0",
        ),
        (
            "ict_classes",
            lambda model, z: model.sample([0], 1, ["six"]),
            "class_label='six', but .* without names",
        ),
        (
            "ict",
            lambda model, z: model.sample([0], 3),
            "num_steps=3 must be at most the number of sampling_sigmas",
        ),
        (
            "flow",
            lambda model, z: model(z, torch.tensor([0.5, 1.0])),
            "the noise level must be above 0 and from",
        ),
        ("edm", lambda model, z: model(z, -1.0), "the noise level must be above 0 and finite"),
        (
            "edm",
            lambda model, z: model(z, torch.ones(7)),
            r"must be a number or .*got the shape \(7,",
        ),
        ("ict", lambda model, z: model(z, 0.001), "the noise level must be .*0.002"),
        (
            "edm_classes",
            lambda model, z: model(z, 1.0, torch.zeros(2)),
            "class_label=0.0, but the net has num_classes=10: give a number",
        ),
        (
            "edm",
            lambda model, z: model(z[:, 0], 0.5),
            r"z must be float \(B, 1, 8, 8\), got \(2, 8, 8\)",
        ),
    ],
)
def test_a_loaded_model_refuses_impossible_arguments(kind, call, message, runs):
    with pytest.raises(InputError, match=message):
        call(lit_knn.load(runs[kind][0]), seeded_noise(range(2), (1, 8, 8)))


def test_the_functions_of_diffusion_and_consistency_models(runs):
    run, _, exported = runs["edm"]
    z, sigma = seeded_noise(SEEDS, (1, 8, 8)), torch.tensor([0.01, 0.1, 1.0, 10.0, 80.0])
    net = UNet(1, channels=8, multipliers=(1, 2), blocks=1, augment_dim=9)
    expected = Network(last(run), net).posterior_mean(z, sigma)
    model = lit_knn.load(exported)
    # The file tells the architecture, so that nobody needs to give it.
    for found in (
        load_network(last(run)),
        model,
        model.posterior_mean,
        Network(last(run)).posterior_mean,
    ):
        assert torch.equal(found(z, sigma), expected)
    assert torch.equal(model(z, sigma[:, None, None, None]), expected)
    torch.testing.assert_close(model.posterior_mean(z, 10.0)[3], expected[3])
    # Gradients pass through the denoiser to z, for guidance.
    z.requires_grad_()
    model.posterior_mean(z, 1.0).sum().backward()
    assert z.grad.abs().sum() > 0
    # A consistency model takes numbers of any kind, and is no denoiser.
    consistency = lit_knn.load(runs["ict"][0])
    assert torch.equal(consistency(z, 2), consistency(z, torch.full((5,), 2.0)))
    assert not hasattr(consistency, "posterior_mean")


# Files that keep all options


class Own(VelocityOutput):
    """A user's parameterisation."""


@pytest.mark.parametrize(
    ("output", "sampler", "refused"),
    [
        (VelocityOutput, FixedSteps(), None),
        (DataOutput, FixedSteps(euler_step), None),
        (partial(EDMOutput, sigma_data=0.25), FixedSteps(euler_step), None),
        # A user's own class can be saved, but a file cannot name it.
        (Own, FixedSteps(), "output must name one of"),
    ],
)
def test_every_flow_makes_the_round_trip(output, sampler, refused, tmp_path):
    net = UNet(1, channels=8, multipliers=(1,), blocks=1, num_classes=3)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    times, network = LogitNormalTimes(low=0.1, high=0.8), output(net)
    model = FlowModel(network, (1, 4, 4), times, sampler, 3, 2)
    write_exported(tmp_path / "model.safetensors", model.eval())
    if refused:
        with pytest.raises(InputError, match=refused):
            lit_knn.load(tmp_path / "model.safetensors")
        return
    loaded = lit_knn.load(tmp_path / "model.safetensors")
    assert loaded.description() == model.description()
    velocity = partial(network.requires_grad_(False), class_label=torch.full((len(SEEDS),), 2))
    expected = sampler(velocity, seeded_noise(SEEDS, (1, 4, 4)), times, 3)
    assert torch.equal(loaded.sample(SEEDS), expected)
    assert torch.equal(model.sample(SEEDS), expected)


@pytest.mark.parametrize(
    "net",
    [
        UNet(3, channels=8, multipliers=(1, 2), blocks=1, num_classes=3, augment_dim=2),
        small_published(DDPMpp, num_classes=3),
        small_published(NCSNpp, fourier_scale=0.5),
        small_published(ADM, channels=8, num_classes=3, head_width=4),
    ],
    ids=lambda net: type(net).__name__,
)
def test_plain_values_describe_every_network_and_sampler(net):
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    model = DiffusionModel(
        EDMPrecond(net.eval()), (3, 32, 32), NoiseGrid(0.01, 20.0, rho=3.0), num_steps=3
    )
    state = torch.get_rng_state()
    samples = build(json.loads(json.dumps(model.description())), net.state_dict()).sample([0, 1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(samples, model.sample([0, 1]))
    usual = DiffusionModel(EDMPrecond(net), (3, 32, 32), NoiseGrid(0.01, 20.0), num_steps=3)
    assert not torch.allclose(samples, usual.sample([0, 1]), atol=1e-3)


def test_loading_and_sampling_load_neither_lightning_nor_faiss(runs, tmp_path):
    run, _, exported = runs["edm_classes"]
    transformer = FlowModel(
        VelocityOutput(DiT(1, width=16, depth=1, heads=2)), (1, 8, 8), TimeSpan(0.1, 0.9)
    )
    write_exported(tmp_path / "model.safetensors", transformer.eval())
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import lit_knn; light = set(sys.modules) - before; "
        f"a = lit_knn.load({str(run)!r}).sample(range(2)); b = lit_knn.load({str(exported)!r}).sample(range(2)); "
        "assert torch.equal(a, b); print(*light); "
        f"c = lit_knn.load({str(tmp_path)!r}); assert c.sample([0], 2).shape == (1, 1, 8, 8); "
        "assert type(c.network.model).__name__ == 'DiT'; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    light, loaded = (set(line.split()) for line in result.stdout.splitlines())
    assert light <= {"lit_knn", "typing"}
    assert {"lit_knn", "safetensors"} <= loaded
    assert not loaded & {
        "pytorch_lightning",
        "lightning",
        "lightning_fabric",
        "jsonargparse",
        "faiss",
        "matplotlib",
    }
    assert not loaded & {
        "torchvision",
        "torchmetrics",
        "sklearn",
        "scipy",
        "yaml",
        "callbacks",
        "main",
    }


# Networks and runs from elsewhere


class Foreign(nn.Module):
    """A user's network, with two names for one weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.again = self.conv

    def forward(self, z_scaled, noise_label, class_label=None):
        return self.again(z_scaled) * noise_label.reshape(-1, 1, 1, 1)


def test_a_network_of_a_users_own_is_given(tmp_path):
    options = ["--model.net", "tests.runs.test_hand_over.Foreign", "--model.estimator", "OneSample"]
    place = [
        "--trainer.logger.save_dir",
        str(tmp_path),
        "--trainer.logger.name",
        "own",
        "--trainer.max_steps",
        "1",
    ]
    main(["fit", "-c", DEMO, *TINY[:2], *options, *place])
    run, out = tmp_path / "own" / "one_sample_0", tmp_path / "out"
    with pytest.raises(
        InputError, match=r"last\.ckpt: the file does not tell the architecture .*: give net"
    ):
        lit_knn.load(run)
    model = lit_knn.load(run, net=Foreign())
    export(run, out)
    export(run, tmp_path / "given", net=Foreign())
    for folder in (out, tmp_path / "given"):
        assert torch.equal(lit_knn.load(folder, net=Foreign()).sample(SEEDS), model.sample(SEEDS))
        assert "from tests.runs.test_hand_over import Foreign" in (folder / "README.md").read_text()
    with pytest.raises(InputError, match="the weights do not fit the architecture"):
        lit_knn.load(run, net=UNet(1, channels=8))


@pytest.mark.parametrize("name", ["0.0", "0.1", "uncond_vp.pkl", "cond_ve.pkl"])
def test_a_published_network_is_sampled_as_by_edm(name, tmp_path):
    """The pickles are of NVIDIA's code, or of a small network in its form with this dropout of labels."""
    pickled = GENUINE / name
    if not name.endswith(".pkl"):
        pickled = write_published(
            tmp_path / "edm.pkl", small_published(num_classes=3, label_dropout=float(name))
        )
    elif not pickled.is_file():
        pytest.skip("no ../shared/data/edm-pickles with networks pickled by NVIDIA's code")
    convert(pickled, tmp_path / "edm.safetensors")
    for path in (pickled, tmp_path / "edm.safetensors"):
        model = lit_knn.load(path)
        labels = None if model.num_classes == 0 else torch.tensor([0, 1])
        mean = partial(Network(pickled).posterior_mean, labels=labels)
        expected = heun_sampler(mean, seeded_noise([5, 6], model.image_shape), 3)
        assert torch.equal(model.sample([5, 6], 3, class_label=labels), expected)
        if name == "0.1":  # This network was trained without classes, too.
            assert model.sample([5], 2, guidance=2).isfinite().all()
        elif name == "0.0":
            with pytest.raises(
                InputError, match="needs a network that was trained without classes"
            ):
                model.sample([5], 2, guidance=2)


def test_run_is_its_last_or_most_trained_kept_checkpoint(runs, tmp_path):
    run, alone = runs["edm"][0], tmp_path / "knn_0"
    folder = alone / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(
        InputError, match=r"knn_0 has neither checkpoints/last\.ckpt nor a kept checkpoint"
    ):
        lit_knn.load(alone)
    with pytest.raises(InputError, match=r"\(images_seen=N\.ckpt\); it holds the runs knn_0$"):
        lit_knn.load(tmp_path)
    (folder / "images_seen=9.ckpt").write_bytes(b"damaged")  # By name it would be the last.
    # NetworkSpeed lays weights out channels last; `predict` copies them into a network with the usual layout.
    checkpoint = torch.load(last(run), weights_only=True)
    for name, value in checkpoint["state_dict"].items():
        if value.ndim == 4:
            checkpoint["state_dict"][name] = value.to(memory_format=torch.channels_last)
    torch.save(checkpoint, folder / "images_seen=10.ckpt")
    expected, model = lit_knn.load(run).sample([0, 1], 2), lit_knn.load(alone)
    assert torch.equal(model.sample([0, 1], 2), expected)
    assert all(value.is_contiguous() for value in model.parameters())
    (folder / "images_seen=11.ckpt").write_bytes(b"damaged")
    (folder / "last.ckpt").write_bytes(last(run).read_bytes())
    # A run may go on after its export.
    (alone / "model.safetensors").write_bytes(b"of an earlier step")
    assert torch.equal(lit_knn.load(alone).sample([0, 1], 2), expected)


# Files that are wrong: one case of each kind

GONE = object()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format_version", "2", "has format version '2'; this version of lit_knn reads 1"),
        ("model.options.sigma_max", GONE, "needs the option sigma_max"),
        ("model.options.num_steps", 0, "num_steps must be at least 1, got 0"),
        ("model.options.num_steps", GONE, "needs the option num_steps"),
        ("model.kind", "song", "the model cannot be read: 'song'"),
        (
            "model.image_shape",
            [3, 8, 8],
            r"UNet: in_channels=1, but the images have the shape \(3, 8, 8\)",
        ),
        (
            "model.architecture.options.blocks",
            10**9,
            "the weights do not fit the architecture: .* too few",
        ),
        (
            "model.architecture.class",
            "os.system",
            "class must be one of ADM, DDPMpp, Diffusers, DiT, NCSNpp, UNet",
        ),
    ],
)
def test_hostile_metadata_is_refused_in_one_line(place, value, message, runs, tmp_path):
    file, path = runs["edm"][2] / "model.safetensors", tmp_path / "bad.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    content = {**metadata, "model": json.loads(metadata["model"])}
    *outer, name = place.split(".")
    reduce(getitem, outer, content)[name] = value
    if value is GONE:
        del reduce(getitem, outer, content)[name]
    texts = {
        name: entry if isinstance(entry, str) else json.dumps(entry)
        for name, entry in content.items()
    }
    save_file(load_file(file), path, texts)
    with pytest.raises(InputError, match=message) as caught:
        lit_knn.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_files_that_are_wrong_are_refused(runs, tmp_path):
    whole = torch.load(last(runs["edm"][0]), weights_only=True)
    torch.save({**whole, TOLD: {**whole[TOLD], "prefix": "other."}}, tmp_path / "prefix.ckpt")
    (tmp_path / "text.safetensors").write_text("text")
    for name, message in (
        ("prefix.ckpt", "the weights do not fit the architecture"),
        ("a.pt", "no such file or folder of a run; a network file must be one of"),
        ("text.safetensors", "cannot be read as a safetensors file"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            lit_knn.load(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))
