"""`lit_knn.load` gives the network of any run for sampling in plain PyTorch, and runs nothing of a file."""

import json
import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lit_knn
from lit_knn.commands.export import export
from lit_knn.common.errors import InputError
from lit_knn.common.pixels import to_uint8
from lit_knn.estimators import Network, OneSample
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.conditioning import Conditioning
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from lit_knn.nets.architecture import architecture_of, build_network
from lit_knn.nets.flow import DataOutput, EDMOutput, NoiseOutput, VelocityOutput
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.sampling import DiffusionModel, FlowModel
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.sampling.loading import build, convert, load_network, write_exported
from lit_knn.sampling.samplers import consistency_sampler, heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.sampling.solvers import euler_step, heun_step
from main import main
from tests.command_lines import ROOT
from tests.networks import small_published, write_published
from tests.trained_runs import CONFIGS, last

GENUINE = ROOT.parent / "shared" / "data" / "edm-pickles"
MODULES = {"ict": LitICT, "edm": LitEDM, "ect": LitECT, "flow": LitFlow}
OWN_STEPS = {"ict": 1, "edm": 18, "ect": 1, "flow": 18}
SEEDS = range(5)
TOLD = "generative_model"
AUGMENTED = ("edm", "flow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, trained_run):
    """A run of each kind, with and without classes: its folder, its command-line options, its exported folder."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for kind in CONFIGS:
        run, options = trained_run(kind)
        export(run, root / f"exported_{kind}")
        found[kind] = (run, options, root / f"exported_{kind}")
    return found


def net_of(kind):
    classes, augment_dim = 10 if kind.endswith("_classes") else 0, 9 if kind in AUGMENTED else 0
    return UNet(1, channels=8, multipliers=(1, 2), blocks=1, num_classes=classes, augment_dim=augment_dim)


def module_of(kind, run):
    """The Lightning module with the run's weights, as `predict` makes it."""
    more = {"augmentation": GeometricAugmentation()} if kind in AUGMENTED else {}
    more |= {"start": str(last(run.parent.parent / "edm" / "knn_0"))} if kind == "ect" else {}
    module = MODULES[kind.partition("_")[0]]
    return module.load_from_checkpoint(last(run), net=net_of(kind), estimator=OneSample(), **more).eval()


@torch.no_grad()
def drawn_by_hand(kind, run, steps):
    """Images of the run's weights, by the functions that sample with any network."""
    stored = torch.load(last(run), weights_only=True)["state_dict"]
    net, prefix = net_of(kind), next(iter(stored)).partition("embedding")[0]
    net.load_state_dict({name.removeprefix(prefix): value for name, value in stored.items()})
    net.eval()
    classes = Conditioning(net, kind.endswith("_classes"), None).of_samples(SEEDS, torch.device("cpu"))
    latents = [seeded_noise(SEEDS, (1, 8, 8), draw) for draw in range(2)]
    if kind.startswith("edm"):
        return heun_sampler(partial(EDMPrecond(net), class_label=classes), latents[0], steps)
    if kind == "flow":
        velocity = partial(VelocityOutput(net), class_label=classes)
        return FixedSteps(heun_step)(velocity, latents[0], UniformTimes(), steps)
    sigma_min = 0.0 if kind == "ect" else 0.002
    function = partial(ConsistencyFunction(net, sigma_min=sigma_min), class_label=classes)
    return consistency_sampler(function, torch.stack(latents[:steps]), [80.0, 0.821][:steps], sigma_min)


@pytest.mark.parametrize("kind", CONFIGS)
def test_run_checkpoint_and_export_give_the_images_of_the_module_bit_for_bit(kind, runs):
    run, _, exported = runs[kind]
    own = OWN_STEPS[kind.partition("_")[0]]
    expected = {steps: drawn_by_hand(kind, run, steps or own) for steps in (None, 2)}
    module = module_of(kind, run)
    for model in (module, lit_knn.load(exported)):
        assert torch.equal(model.sample(SEEDS), expected[None])
    assert torch.equal(module.sample(SEEDS, 2), expected[2])
    for model in map(lit_knn.load, (run, last(run), exported, exported / "model.safetensors")):
        assert model.num_steps == own
        assert torch.equal(model.sample(SEEDS, 2), expected[2])
    for images in expected.values():
        assert images.dtype == torch.float32
        assert images.isfinite().all()
        assert images.std() > 0.01
    assert not torch.equal(*expected.values())


@pytest.mark.parametrize("kind", ["ict_classes", "flow"])
def test_the_images_are_those_of_predict(kind, runs, tmp_path):
    run, options, exported = runs[kind]
    more = ["--data.predict_samples", "16", "--trainer.callbacks", "[]", "--trainer.logger", "false"]
    more += ["--sample_writer.format", "npz", "--sample_writer.folder", str(tmp_path / "out")]
    main(["predict", *options, *more, "--ckpt_path", str(last(run))])
    written = np.load(tmp_path / "out" / "samples.npz")
    assert written["seeds"].tolist() == list(range(16))
    images = to_uint8(lit_knn.load(exported).sample(range(16)))
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), written["images"])


@pytest.mark.parametrize("kind", ["ict_classes", "edm_classes"])
def test_a_class_is_chosen_or_drawn_from_the_seed(kind, runs):
    model = lit_knn.load(runs[kind][0])
    assert model.num_classes == 10
    drawn = model.sample(SEEDS, 2)
    each = torch.stack([model.sample(SEEDS, 2, class_label=label) for label in range(10)])
    # An item's image is the image of one of the classes, and batches of any classes give the same images.
    chosen = [next(label for label in range(10) if torch.equal(each[label, i], drawn[i])) for i in range(len(SEEDS))]
    assert len(set(chosen)) > 1
    assert torch.equal(model.sample(SEEDS, 2, chosen), drawn)
    assert torch.equal(model.sample(SEEDS, 2, torch.tensor(chosen)), drawn)
    # Sums of one row may round differently.
    torch.testing.assert_close(model.sample([3], 2), drawn[3:4], rtol=0, atol=1e-5 * float(drawn.abs().max()))
    for label in (10, -1, True, [0, 1], [0, 1, 2, 3, 10], torch.zeros(5)):
        with pytest.raises(InputError, match="class_label"):
            model.sample(SEEDS, class_label=label)


def test_an_unconditional_model_has_no_class_and_refuses_impossible_steps(runs):
    consistency, diffusion = lit_knn.load(runs["ict"][0]), lit_knn.load(runs["edm"][0])
    for model in (consistency, diffusion):
        assert model.num_classes == 0
        with pytest.raises(InputError, match="class_label=0, but the network has num_classes=0"):
            model.sample([0], class_label=0)
        with pytest.raises(InputError, match="num_steps"):
            model.sample([0], num_steps=0)
    with pytest.raises(InputError, match="num_steps=3 must be from 1 to the number of sampling_sigmas, 2"):
        consistency.sample([0], num_steps=3)


def test_a_loaded_model_is_ready_to_use_and_says_what_it_is(runs):
    state = torch.get_rng_state()
    for kind, name in (("ict", "ConsistencyModel"), ("edm_classes", "DiffusionModel"), ("flow", "FlowModel")):
        model = lit_knn.load(runs[kind][0])
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        count = sum(value.numel() for value in model.net.parameters())
        classes = "10 classes" if "classes" in kind else "unconditional"
        steps = "1 step" if kind == "ict" else "18 steps"
        assert repr(model) == f"{name}(UNet, 1x8x8 images, {classes}, {count:,} parameters, {steps})"
        assert model.to("cpu").double().to(torch.float32).sample([0]).shape == (1, 1, 8, 8)
    assert torch.equal(torch.get_rng_state(), state)  # Loading and sampling must not change a seeded run's draws.


@pytest.mark.parametrize(
    ("kind", "refused"), [("ict", (0.001, math.nan)), ("edm", (0.0, -1.0, math.inf)), ("flow", (0.0, 1.0, 1.5))]
)
def test_a_loaded_model_refuses_impossible_latents_and_levels(kind, refused, runs):
    model, z = lit_knn.load(runs[kind][0]), seeded_noise(SEEDS, (1, 8, 8))
    assert torch.equal(model(z, 0.5), model(z, torch.full((5,), 0.5)))
    for level in refused:
        with pytest.raises(InputError, match="the noise level must be above 0, from"):
            model(z, torch.tensor([0.5, 0.5, 0.5, level, 0.5]))
    with pytest.raises(InputError, match="a number or one for each of 5 z"):
        model(z, torch.ones(4))
    with pytest.raises(InputError, match=r"z must be float \(B, 1, 8, 8\), got \(5, 8, 8\)"):
        model(z[:, 0], 0.5)
    if kind == "ict":
        # At the least level, here in float32, the model is the identity.
        assert torch.equal(model(z, torch.tensor(0.002)), z)
    else:
        with pytest.raises(InputError, match="the noise level must be above 0"):
            model.posterior_mean(z, -1.0)


def test_the_denoiser_of_a_diffusion_model(runs):
    run, _, exported = runs["edm"]
    z, sigma = seeded_noise(SEEDS, (1, 8, 8)), torch.tensor([0.01, 0.1, 1.0, 10.0, 80.0])
    expected = load_network(last(run))(z, sigma)
    model = lit_knn.load(exported)
    assert torch.equal(model.posterior_mean(z, sigma), expected)
    assert torch.equal(model(z, sigma), expected)
    torch.testing.assert_close(model.posterior_mean(z, 10.0)[3], expected[3])
    # Gradients pass through the denoiser to z, for guidance.
    z.requires_grad_()
    model.posterior_mean(z, 1.0).sum().backward()
    assert z.grad.abs().sum() > 0
    assert not hasattr(lit_knn.load(runs["ict"][0]), "posterior_mean")


def test_the_denoiser_of_a_flow_model_is_that_of_the_change_of_variables(runs):
    # x + σε at σ is (1 − τ)x + τε divided by 1 − τ, with τ = σ/(1 + σ); and E[x|z] = z − τv.
    model = lit_knn.load(runs["flow"][0])
    y, sigma = 3 * seeded_noise(SEEDS, (1, 8, 8)), torch.tensor([0.01, 0.1, 1.0, 10.0, 80.0])
    tau = (sigma / (1 + sigma)).reshape(-1, 1, 1, 1)
    z = (1 - tau) * y
    velocity = model.net(z, (tau / (1 - tau)).log().flatten() / 4)
    torch.testing.assert_close(model.posterior_mean(y, sigma), z - tau * velocity, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.posterior_mean(y, 10.0)[3], model.posterior_mean(y, sigma)[3])


@pytest.mark.parametrize(
    ("output", "sampler"),
    [
        (VelocityOutput, FixedSteps()),
        (DataOutput, FixedSteps(euler_step)),
        (NoiseOutput, FixedSteps()),
        (EDMOutput, FixedSteps(euler_step)),
    ],
)
def test_every_flow_makes_the_round_trip(output, sampler, tmp_path):
    net = UNet(1, channels=8, multipliers=(1,), blocks=1, num_classes=3)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    times = LogitNormalTimes(low=0.1, high=0.8)
    network = output(net, sigma_data=0.25) if output is EDMOutput else output(net)
    model = FlowModel(network, (1, 4, 4), times, sampler, 3, 2)
    write_exported(tmp_path / "model.safetensors", model.eval())
    loaded = lit_knn.load(tmp_path / "model.safetensors")
    assert loaded.description() == model.description()
    assert torch.equal(loaded.sample(SEEDS), model.sample(SEEDS))
    velocity = partial(network.requires_grad_(False), class_label=torch.full((len(SEEDS),), 2))
    assert torch.equal(loaded.sample(SEEDS), sampler(velocity, seeded_noise(SEEDS, (1, 4, 4)), times, 3))
    with pytest.raises(InputError, match="num_steps must be an integer from 1 to 16777216, got 0"):
        loaded.sample(SEEDS, 0)


def test_a_users_parameterisation_does_not_end_its_training_but_is_not_loaded(tmp_path):
    class Own(VelocityOutput):
        pass

    net = UNet(1, channels=8, multipliers=(1,), blocks=1)
    for network, sampler, message in (
        (Own(net), None, "output must name one of"),
        (VelocityOutput(net), FixedSteps(partial(heun_step)), "solver must be one of"),
    ):
        model = FlowModel(network, (1, 4, 4), UniformTimes(), sampler, 3)
        write_exported(tmp_path / "model.safetensors", model)
        with pytest.raises(InputError, match=message):
            lit_knn.load(tmp_path / "model.safetensors")


def test_the_weights_make_the_round_trip(runs):
    for run, _, exported in runs.values():
        stored = torch.load(last(run), weights_only=True)
        prefix = stored[TOLD]["prefix"]
        weights = load_file(exported / "model.safetensors")
        assert {prefix + name for name in weights} == stored["state_dict"].keys()
        assert all(torch.equal(stored["state_dict"][prefix + name], value) for name, value in weights.items())


def test_another_layout_in_memory_gives_the_same_images(runs, tmp_path):
    # NetworkSpeed lays weights out channels last; `predict` copies them into a network with the usual layout.
    (tmp_path / "checkpoints").mkdir()
    checkpoint = torch.load(last(runs["edm"][0]), weights_only=True)
    for name, value in checkpoint["state_dict"].items():
        if value.ndim == 4:
            checkpoint["state_dict"][name] = value.to(memory_format=torch.channels_last)
    torch.save(checkpoint, last(tmp_path))
    model = lit_knn.load(tmp_path)
    assert torch.equal(model.sample(SEEDS, 2), lit_knn.load(runs["edm"][0]).sample(SEEDS, 2))
    assert all(value.is_contiguous() for value in model.parameters())


def test_loading_and_sampling_load_neither_lightning_nor_faiss(runs):
    run, _, exported = runs["edm_classes"]
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import lit_knn; light = set(sys.modules) - before; "
        f"a = lit_knn.load({str(run)!r}).sample(range(2)); b = lit_knn.load({str(exported)!r}).sample(range(2)); "
        "assert torch.equal(a, b); print(*light); "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    light, loaded = (set(line.split()) for line in result.stdout.splitlines())
    assert light <= {"lit_knn", "typing"}
    assert {"lit_knn", "safetensors"} <= loaded
    assert not loaded & {"pytorch_lightning", "lightning", "lightning_fabric", "jsonargparse", "faiss", "matplotlib"}
    assert not loaded & {"torchvision", "torchmetrics", "sklearn", "scipy", "yaml", "callbacks", "main"}


# Networks


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
def test_every_network_is_built_again_from_plain_values(net):
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    described = json.loads(json.dumps(architecture_of(net)))
    state = torch.get_rng_state()
    built = build_network(described, net.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    z, label = torch.randn(2, 3, 32, 32), torch.tensor([-1.0, 0.5])
    classes = torch.tensor([2, 0]) if net.num_classes else None
    with torch.no_grad():
        assert torch.equal(built.eval()(z, label, classes), net.eval()(z, label, classes))
    assert architecture_of(built) == architecture_of(net)


class Foreign(nn.Module):
    """A user's network, with two names for one weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.again = self.conv

    def forward(self, z_scaled, noise_label, class_label=None):
        return self.again(z_scaled) * noise_label.reshape(-1, 1, 1, 1)


def foreign_run(folder):
    options = ["--model.net", "tests.runs.test_hand_over.Foreign", "--model.estimator", "OneSample"]
    config = ["-c", str(ROOT / "configs" / "demo.yaml"), "-c", str(ROOT / "tests" / "tiny.yaml"), *options]
    more = ["--trainer.max_steps", "1", "--trainer.logger.save_dir", str(folder), "--trainer.logger.name", "own"]
    main(["fit", *config, *more])
    return folder / "own" / "one_sample_0"


def test_a_network_of_a_users_own_is_given(tmp_path):
    run = foreign_run(tmp_path)
    with pytest.raises(
        InputError, match=r"last\.ckpt: the file does not tell the architecture of its network: give net"
    ):
        lit_knn.load(run)
    with pytest.raises(InputError, match="give net"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model = lit_knn.load(run, net=Foreign())
    export(run, tmp_path / "out", net=Foreign())
    assert torch.equal(lit_knn.load(tmp_path / "out", net=Foreign()).sample(SEEDS), model.sample(SEEDS))
    assert "net=..." in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(InputError, match="the weights do not fit the architecture"):
        lit_knn.load(run, net=UNet(1, channels=8))


# Published files


def test_a_published_network_is_sampled_as_by_edm(tmp_path):
    pickled = write_published(tmp_path / "edm.pkl", small_published(num_classes=3))
    convert(pickled, tmp_path / "edm.safetensors")
    network = Network(pickled)
    labels = torch.tensor([0, 2, 1, 1, 0])

    def mean(z, sigma):
        return network.posterior_mean(z, sigma, labels=labels)

    expected = heun_sampler(mean, seeded_noise(SEEDS, (3, 32, 32)), 4)
    for path in (pickled, tmp_path / "edm.safetensors"):
        model = lit_knn.load(path)
        assert repr(model).startswith("DiffusionModel(DDPMpp, 3x32x32 images, 3 classes, ")
        assert torch.equal(model.sample(SEEDS, 4, class_label=labels), expected)


def test_a_published_network_is_guided_if_it_was_trained_without_classes_too(tmp_path):
    for dropout in (0.1, 0.0):
        net = small_published(num_classes=3, label_dropout=dropout)
        model = lit_knn.load(write_published(tmp_path / f"{dropout}.pkl", net))
        if dropout:
            assert model.sample([5], 2, guidance=2).isfinite().all()
        else:
            with pytest.raises(InputError, match="needs a network that was trained without classes, too"):
                model.sample([5], 2, guidance=2)


def test_a_file_keeps_the_levels_of_its_sampler():
    net = UNet(1, channels=8).eval()
    model = DiffusionModel(EDMPrecond(net), (1, 8, 8), NoiseGrid(0.01, 20.0, rho=3.0), num_steps=3)
    torch.nn.init.normal_(net.get_parameter(next(reversed(dict(net.named_parameters())))), std=0.1)
    samples = build(model.description(), net.state_dict()).sample(SEEDS)
    assert torch.equal(samples, model.sample(SEEDS))
    usual = DiffusionModel(EDMPrecond(net), (1, 8, 8), NoiseGrid(0.01, 20.0), num_steps=3)
    assert not torch.allclose(samples, usual.sample(SEEDS), atol=1e-3)


@pytest.mark.skipif(not GENUINE.is_dir(), reason="no ../shared/data/edm-pickles with networks pickled by NVIDIA's code")
@pytest.mark.parametrize("name", ["uncond_vp", "cond_ve"])
def test_a_genuine_pickle_gives_the_samples_of_its_network(name):
    model, network = lit_knn.load(GENUINE / f"{name}.pkl"), Network(GENUINE / f"{name}.pkl")
    labels = None if model.num_classes == 0 else torch.tensor([0, 1])
    latents = seeded_noise([5, 6], model.image_shape)

    def mean(z, sigma):
        return network.posterior_mean(z, sigma, labels=labels)

    assert torch.equal(model.sample([5, 6], 3, class_label=labels), heun_sampler(mean, latents, 3))
    # EDM trained its networks with classes alone.
    why = "needs a network that was trained without classes, too" if model.num_classes else "needs a class-conditional"
    with pytest.raises(InputError, match=why):
        model.sample([5], guidance=2)


def test_a_run_is_its_last_checkpoint_or_the_kept_one_of_the_most_images(runs, tmp_path):
    run = runs["ict"][0]
    folder = tmp_path / "knn_0" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(InputError, match=r"knn_0 has neither checkpoints/last\.ckpt nor a kept checkpoint"):
        lit_knn.load(tmp_path / "knn_0")
    (folder / "images_seen=9.ckpt").write_bytes(b"damaged")
    (folder / "images_seen=10.ckpt").write_bytes(last(run).read_bytes())
    expected = lit_knn.load(run).sample([0])
    assert torch.equal(lit_knn.load(tmp_path / "knn_0").sample([0]), expected)
    (folder / "images_seen=11.ckpt").write_bytes(b"damaged")
    (folder / "last.ckpt").write_bytes(last(run).read_bytes())
    assert torch.equal(lit_knn.load(tmp_path / "knn_0").sample([0]), expected)


# Files that are wrong


def with_metadata(exported, path, change, weights=None):
    """Copy an exported file with changed metadata or weights."""
    from safetensors import safe_open

    file = exported / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    model = json.loads(metadata["model"])
    change(metadata, model)
    if "model" in metadata:
        metadata["model"] = metadata["model"] if metadata["model"] == "{" else json.dumps(model)
    save_file(load_file(file) if weights is None else weights, path, metadata)
    return path


def option(name, value):
    return lambda metadata, model: model["options"].update({name: value})


def net_option(name, value):
    return lambda metadata, model: model["architecture"]["options"].update({name: value})


def value(name, new):
    return lambda metadata, model: model.update({name: new})


def entry(name, new):
    return lambda metadata, model: metadata.update({name: new})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry("format", "other"), "is not a model that lit_knn exported or converted"),
        (entry("format_version", "2"), "has format version '2'; this version of lit_knn reads 1"),
        (lambda metadata, model: metadata.pop("model"), "holds no description of its model"),
        (value("kind", "TextToImage"), "kind must be one of consistency, diffusion, flow"),
        (value("options", [1]), r"options must be a dict, got \[1\]"),
        (lambda metadata, model: model["options"].pop("sigma_max"), "needs the option sigma_max"),
        (option("sigma_data", 0), "sigma_data must be a positive number, got 0"),
        (option("sigma_max", 1e-5), "need 0 < sigma_min < sigma_max"),
        (option("num_steps", 10**30), "num_steps must be an integer from 1 to 16777216"),
        (option("sampling_class", 0), "sampling_class=0, but the network has num_classes=0"),
        (value("image_shape", [3, 8, 8]), r"UNet: in_channels=1, but the images have the shape \(3, 8, 8\)"),
        (value("architecture", None), "does not tell the architecture of its network: give net"),
        (
            value("architecture", {"class": "os.system", "options": {}}),
            "class must be one of ADM, DDPMpp, NCSNpp, UNet",
        ),
        (net_option("channels", 10**12), "architecture: UNet cannot have the options"),
        (net_option("blocks", 10**9), "UNet: blocks must be at most 100, got 1000000000"),
        (net_option("channels", 16), "the weights do not fit the architecture"),
        (lambda metadata, model: model["architecture"]["options"].pop("blocks"), "the options of UNet must be "),
    ],
)
def test_hostile_metadata_is_refused_in_one_line(change, message, runs, tmp_path):
    path = with_metadata(runs["edm"][2], tmp_path / "bad.safetensors", change)
    with pytest.raises(InputError, match=message) as caught:
        lit_knn.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_weights_that_are_missing_or_not_finite_are_refused(runs, tmp_path):
    weights = load_file(runs["edm"][2] / "model.safetensors")
    name = "conv_in.weight"
    for change, message in (
        ({name: weights[name] * float("nan")}, "'conv_in.weight' holds a weight that is not finite"),
        ({name: weights[name][:1].clone()}, "the weights do not fit the architecture"),
        ({name: weights[name].to(torch.complex64)}, "'conv_in.weight' is not an ordinary tensor"),
        ({name: weights[name].to(torch.float8_e4m3fn)}, "'conv_in.weight' is not an ordinary tensor"),
        ({"more": torch.ones(1)}, "the weights do not fit the architecture"),
    ):
        bad = with_metadata(runs["edm"][2], tmp_path / "bad.safetensors", entry("a", "b"), {**weights, **change})
        with pytest.raises(InputError, match=message):
            lit_knn.load(bad)


def test_checkpoints_that_are_wrong_are_refused(runs, tmp_path):
    run = tmp_path / "knn_0"
    (run / "checkpoints").mkdir(parents=True)
    whole = torch.load(last(runs["edm"][0]), weights_only=True)
    huge = {name: torch.zeros(1).expand(2**40) for name in whole["state_dict"]}
    doubled = []
    for _ in range(100):  # Its 2^100 paths would take for ever.
        doubled = [doubled, doubled]
    for change, message in (
        ({"state_dict": None, "more": doubled}, "no checkpoint of a training: it has no state_dict"),
        ({"state_dict": None}, "no checkpoint of a training: it has no state_dict"),
        ({TOLD: [1]}, "generative_model must be a dict with a prefix"),
        ({TOLD: {**whole[TOLD], "prefix": "other."}}, r"no weights named other\.\*"),
        ({"state_dict": dict.fromkeys(whole["state_dict"], 1.0)}, "no weights named"),
        ({"state_dict": huge}, "its tensors are more than 64 times as large as the file"),
        ({TOLD: None}, "generative_model must be a dict with a prefix"),
    ):
        torch.save({**whole, **change}, last(run))
        with pytest.raises(InputError, match=message) as caught:
            lit_knn.load(run)
        assert str(caught.value).startswith(str(last(run)))
    for name, message in (("a.ckpt", "no such file"), ("a.safetensors", "no such file"), ("a.pt", "must be one of")):
        with pytest.raises(InputError, match=message):
            lit_knn.load(tmp_path / name)
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(InputError, match="is not a safetensors file, or a damaged one"):
        lit_knn.load(tmp_path / "text.safetensors")


def test_the_loader_of_estimators_reads_a_unet_without_being_told(runs):
    z, sigma = seeded_noise(SEEDS, (1, 8, 8)), torch.ones(5)
    run = runs["edm"][0]
    given = UNet(1, channels=8, multipliers=(1, 2), blocks=1, augment_dim=9)
    assert torch.equal(Network(last(run)).posterior_mean(z, sigma), Network(last(run), given).posterior_mean(z, sigma))
