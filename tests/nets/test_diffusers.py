"""Models of the library `diffusers` as networks: labels, timesteps, files, and all training modules."""

import json
import math
import sys

import diffusers
import pytest
import torch

import lit_knn
from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT, LitMeanFlow, LitSCT
from lit_knn.nets.architecture import architecture_of, build_network
from lit_knn.nets.diffusers_model import Diffusers
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling.building import build
from tests.short_training import train
from tests.watched import Labelled

UNET = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "num_class_embeds": 11,
}
DIT = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
    "norm_num_groups": 1,
}
# The default of this class has 860 million weights.
CONDITIONED = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "cross_attention_dim": 8,
}
MODELS = pytest.mark.parametrize(
    ("name", "config"), [("UNet2DModel", UNET), ("diffusers.DiTTransformer2DModel", DIT)]
)


def made(name, config, **options):
    torch.manual_seed(0)
    net = Diffusers(name, config, num_classes=10, **options)
    for weights in net.parameters():  # DiT's last layer starts at zero.
        torch.nn.init.normal_(weights, std=0.1)
    return net


def inputs():
    """Some latents, their noise labels and classes; the second item has no class."""
    return torch.randn(2, 3, 8, 8), torch.tensor([0.1, -0.4]), torch.tensor([3, -1])


@MODELS
def test_saved_folder_gives_the_same_by_diffusers_alone(name, config, tmp_path):
    net = made(name, config, timestep="flow").eval()
    z, noise_label, classes = inputs()
    net.save_pretrained(tmp_path)

    alone = getattr(diffusers, name.rpartition(".")[2]).from_pretrained(tmp_path).eval()
    # The straight path's time of σ = e^(4 · label) is σ/(1 + σ); 10 is the number after the last class.
    sigma = [math.exp(4 * label) for label in noise_label.tolist()]
    times = torch.tensor([1000 * s / (1 + s) for s in sigma])
    expected = alone(z, timestep=times, class_labels=torch.tensor([3, 10])).sample
    torch.testing.assert_close(net(z, noise_label, classes), expected, rtol=1e-4, atol=1e-5)

    again = Diffusers(str(tmp_path), num_classes=10, timestep="flow").eval()
    assert torch.equal(again(z, noise_label, classes), net(z, noise_label, classes))


@MODELS
def test_label_is_the_timestep_as_it_is_and_none_is_no_class(name, config):
    net = made(name, config).eval()
    z, noise_label, _ = inputs()
    expected = net.model(z, timestep=noise_label, class_labels=torch.tensor([10, 10])).sample
    assert torch.equal(net(z, noise_label), expected)


def test_no_label_is_left_out_by_chance_in_training():
    net = made("DiTTransformer2DModel", DIT).train()
    z = torch.randn(1, 3, 8, 8).expand(200, -1, -1, -1)
    outputs = net(z, torch.zeros(200), torch.full((200,), 3))
    torch.testing.assert_close(outputs, outputs[:1].expand_as(outputs))


@MODELS
def test_forward_derivative_is_that_of_finite_differences(name, config):
    net = made(name, config | {"in_channels": 11}).double().eval()
    assert net.augment_dim == 8
    z, dz = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64)
    features, change = torch.randn(2, 2, 8, dtype=torch.float64)

    def output(z, features):
        return net(z, torch.zeros(2, dtype=torch.float64), torch.tensor([1, -1]), features)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, derivative = torch.func.jvp(output, (z, features), (dz, change))
    step = 1e-5
    above = output(z + step * dz, features + step * change)
    below = output(z - step * dz, features - step * change)
    # Timesteps, and groups' statistics in some versions, are computed in float32.
    torch.testing.assert_close(derivative, (above - below) / (2 * step), rtol=1e-3, atol=1e-4)


def tiny(name, config, channels):
    """A model for the images of `Labelled`."""
    classes = {"num_class_embeds": 4} if name == "UNet2DModel" else {"num_embeds_ada_norm": 3}
    sizes = {"sample_size": 4, "in_channels": channels, "out_channels": 1}
    return Diffusers(name, {**config, **sizes, **classes}, num_classes=3)


def assert_trains(model, checkpoint, precision="32-true"):
    """Two steps change the weights, and the checkpoint alone gives the model and its samples."""
    before = [weights.clone() for weights in model.network.parameters()]
    trainer = train(model, Labelled(), steps=2, precision=precision)
    after = list(model.network.parameters())
    assert all(weights.isfinite().all() for weights in after)
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))

    trainer.save_checkpoint(checkpoint)
    loaded = lit_knn.load(checkpoint)
    assert type(loaded.net) is Diffusers
    torch.testing.assert_close(loaded.sample([0, 1]), model.sample([0, 1]), rtol=1e-4, atol=1e-4)
    assert loaded.sample([0, 1]).shape == (2, 1, 4, 4)


KINDS = {"UNet2DModel": UNET, "DiTTransformer2DModel": DIT}


@pytest.mark.parametrize(
    ("module", "name", "precision"),
    [
        (LitICT, "UNet2DModel", "32-true"),
        (LitEDM, "DiTTransformer2DModel", "32-true"),
        (LitFlow, "DiTTransformer2DModel", "bf16-mixed"),
        (LitSCT, "DiTTransformer2DModel", "bf16-mixed"),
        (LitMeanFlow, "UNet2DModel", "32-true"),
        (LitMeanFlow, "DiTTransformer2DModel", "32-true"),
    ],
)
def test_all_modules_train_and_their_files_need_no_net(module, name, precision, tmp_path):
    net = tiny(name, KINDS[name], channels=9 if module is LitMeanFlow else 1)
    options = {"total_steps": 2} if module is LitICT else {}
    model = module(net=net, estimator=KNN(8, 4), class_conditional=True, **options)
    assert_trains(model, tmp_path / "a.ckpt", precision)


def test_consistency_tuning_starts_from_a_model_of_diffusers(tmp_path):
    teacher = LitEDM(tiny("UNet2DModel", UNET, 1), KNN(8, 4), class_conditional=True)
    assert_trains(teacher, tmp_path / "edm.ckpt")
    # The start gives architecture and weights.
    student = LitECT(KNN(8, 4), tmp_path / "edm.ckpt", class_conditional=True)
    assert_trains(student, tmp_path / "ect.ckpt")


@MODELS
def test_described_network_is_built_again_from_plain_values(name, config):
    net = made(name, config, timestep="flow").eval()
    described = json.loads(json.dumps(architecture_of(net)))
    torch.manual_seed(1)
    again = build_network(described, net.state_dict()).eval()
    # A seeded run draws the same numbers after it.
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    z, noise_label, classes = inputs()
    assert torch.equal(again(z, noise_label, classes), net(z, noise_label, classes))


def test_files_that_ask_for_too_much_are_refused(monkeypatch):
    net = made("UNet2DModel", UNET)
    described = architecture_of(net)

    def assert_refused(line, **options):
        changed = {"class": "Diffusers", "options": {**described["options"], **options}}
        with pytest.raises(InputError, match=line):
            build_network(changed, net.state_dict())

    assert_refused("weights do not fit", config={**UNET, "layers_per_block": 10**9})
    assert_refused("config must be a mapping, got None", model="/etc", config=None)
    assert_refused("no class of diffusers", model="DDPMScheduler")

    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "lit_knn.nets.diffusers_model")
    assert_refused(r"diffusers is not installed: pip install 'lit_knn\[hub\]'")


def test_precision_of_the_surrounding_denoiser_holds():
    denoiser = EDMPrecond(made("UNet2DModel", UNET).eval())
    z = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert denoiser(z, torch.tensor([0.5, 3.0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("UNet9DModel", {}), "no class of diffusers and no folder of save_pretrained"),
        (("DDPMScheduler", {}), "no class of diffusers and no folder of save_pretrained"),
        (("UNet2DModel", None), "needs config, the arguments of this class"),
        (("DiTTransformer2DModel", DIT | {"out_channels": 6}), "learned sigma: set out_channels"),
        (("VQModel", {}), "VQModel takes no timestep, so it is no model of images alone"),
        (("UNet2DConditionModel", CONDITIONED), "UNet2DConditionModel needs encoder_hidden_states"),
        (("UNet2DModel", UNET), "UNet2DModel embeds classes: set num_classes"),
        (("UNet2DModel", UNET, "label", 20), "embeds 11 classes.*: set num_class_embeds .* to 21"),
        ((".", {}), "model=. is a folder, which has a config: give none"),
        (("VQModel", {}, "label", 10), "takes no class labels, but num_classes=10"),
        (
            ("UNet2DModel", UNET | {"layer_per_block": 7}),
            "layer_per_block; did you mean layers_per_block",
        ),
        (
            ("UNet2DModel", UNET | {"up_block_types": ["Up"]}),
            "cannot be made of this config: Value",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_with_the_option(arguments, line):
    with pytest.raises(InputError, match=line):
        Diffusers(*arguments)


def test_a_model_that_is_renamed_is_made_again_of_its_options():
    # The library makes a DiTTransformer2DModel of it, which lacks this argument.
    config = DIT | {"norm_type": "ada_norm_zero", "cross_attention_dim": None}
    options = Diffusers("Transformer2DModel", config, "label", 10).options()
    assert options["model"] == "DiTTransformer2DModel"
    assert Diffusers(**options).options() == options


def test_items_without_class_need_an_embedding_of_their_own():
    config, z, noise = UNET | {"num_class_embeds": 10}, torch.zeros(2, 3, 8, 8), torch.zeros(2)
    net = made("UNet2DModel", config)
    assert net(z, noise, torch.tensor([0, 9])).shape == z.shape
    for labels in (None, torch.tensor([3, -1])):
        with pytest.raises(InputError, match="set num_class_embeds of config to 11, or null_class"):
            net(z, noise, labels)
    # The user may also give one of the classes up for it.
    net = made("UNet2DModel", config, null_class=9)
    assert net(z, noise, torch.tensor([3, -1])).equal(net(z, noise, torch.tensor([3, 9])))


def test_checkpoint_of_another_timestep_or_head_is_refused():
    def module(timestep="label", **changed):
        config = {**UNET, "num_class_embeds": None, **changed}
        return LitEDM(Diffusers("UNet2DModel", config, timestep), KNN())

    def saved(model):
        model.image_shape = (3, 8, 8)
        checkpoint = {"state_dict": model.state_dict()}
        model.on_save_checkpoint(checkpoint)
        return checkpoint

    before = saved(module())
    # A dropout has no weights, and a U-Net takes images of any size.
    module(dropout=0.1, sample_size=16).check_checkpoint(before)
    others = {
        "timestep is label in the file, flow in the model": module("flow"),
        "attention_head_dim is 8 in the file, 4 in the model": module(attention_head_dim=4),
    }
    weights = module().network.state_dict()
    for line, other in others.items():
        with pytest.raises(InputError, match=f"another architecture: {line}"):
            other.check_checkpoint(before)
        with pytest.raises(InputError, match=f"another architecture: {line}"):
            build(before["generative_model"], weights, other.network)


def test_images_of_other_channels_are_refused():
    with pytest.raises(InputError, match=r"3 channels, but the images have the shape \(1, 8, 8\)"):
        made("UNet2DModel", UNET)(torch.zeros(2, 1, 8, 8), torch.zeros(2))
