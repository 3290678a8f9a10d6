"""Networks: recorded outputs, labels, first weights, dropout, half precision, and messages for bad input."""

import importlib
import math

import pytest
import torch
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.nets import ADM, DDPMpp, DiT, NCSNpp, UNet
from lit_knn.nets.adm import ADMBlock
from lit_knn.nets.architecture import KNOWN
from lit_knn.nets.base import NO_CLASS
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.nets.published.configs import architecture_from_config
from lit_knn.sampling import ConsistencyModel
from tests import ROOT
from tests.config_files import CONFIGS, RUNS, resolved

FILES = sorted((ROOT / "tests" / "data" / "network-parity").glob("*.pt"))
PUBLISHED = {
    "model_type": "SongUNet",
    "img_resolution": 32,
    "img_channels": 3,
    "channel_mult": [2, 2, 2],
}
FOURIER = {"embedding_type": "fourier", "encoder_type": "residual", "channel_mult_noise": 2}
FOURIER |= {"resample_filter": (1, 3, 3, 1)}
SMALL = {"image_size": 8, "channels": 16, "multipliers": (1, 2), "blocks": 1, "attention_at": (4,)}
OPTIONS = {
    DDPMpp: SMALL,
    NCSNpp: SMALL,
    ADM: {**SMALL, "head_width": 16},
    UNet: {"channels": 16, "multipliers": (1, 2), "blocks": 1},
    DiT: {"width": 16, "depth": 2, "heads": 2},
}
EVERY_NET = pytest.mark.parametrize("kind", OPTIONS)
EVERY_UNET = pytest.mark.parametrize("kind", [DDPMpp, NCSNpp, ADM, UNet])
SONG = pytest.mark.parametrize("kind", [DDPMpp, NCSNpp])


def made(kind, **options):
    torch.manual_seed(0)
    return kind(**{**OPTIONS[kind], **options})


def network_from_config(config):
    described = architecture_from_config(config)
    return KNOWN[described["class"]](**described["options"])


def awake(net):
    """The network with ordinary weights in the layers that start at or near zero."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    return net


def inputs_of(net, name, *arguments):
    """The inputs of all layers of this name in one forward pass."""
    layers = [layer for path, layer in net.named_modules() if path.endswith(f".{name}")]
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        for layer in layers
    ]
    net(*arguments)
    for hook in hooks:
        hook.remove()
    return seen


# What the networks compute


def relative_error(output, expected):
    return (
        ((output - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max().item()
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_published_architectures_give_recorded_outputs(path):
    recorded = torch.load(path, weights_only=True)
    denoiser = EDMPrecond(network_from_config(recorded["config"])).eval()
    denoiser.load_state_dict(recorded["state_dict"], strict=True)
    with torch.no_grad():
        raw = denoiser.model(recorded["raw_input"], recorded["raw_noise_labels"])
        denoised = denoiser(recorded["z"], recorded["sigma"])
    assert relative_error(raw, recorded["raw_output"]) < 1e-5
    assert relative_error(denoised, recorded["denoised"]) < 1e-5
    assert denoised.dtype == torch.float32


DEEP = {"image_size": 8, "channels": 8, "multipliers": (1, 2, 2), "blocks": 1, "attention_at": (8,)}
# Outputs of code that gave the outputs of NVIDIA's networks, and of our own checkpoints.
RECORDED = [
    (DDPMpp, DEEP, [-3.0002, 2.9017, -0.1201, -3.3491, -3.9989, 1.5511, 0.899, -0.0191]),
    (NCSNpp, DEEP, [-3.3938, 2.0762, 0.8271, -4.5544, -5.033, 1.0228, 1.6764, -1.4364]),
    (
        ADM,
        {**DEEP, "head_width": 4},
        [1.0057, 1.5218, -0.1987, -1.3374, 0.1009, 0.4217, 1.2036, -2.1942],
    ),
    (UNet, {"channels": 4}, [1.186, -0.6167, -3.5627, 5.2038, 0.8297, 2.1064, 3.8852, -5.0533]),
]


@pytest.mark.parametrize(("kind", "options", "expected"), RECORDED)
def test_networks_compute_what_they_did_when_compared(kind, options, expected):
    net = kind(in_channels=2, num_classes=2, augment_dim=3, **options).eval()
    with torch.no_grad():
        for name, weights in net.state_dict().items():
            if not name.endswith("resample_filter"):
                weights.copy_(
                    (torch.arange(weights.numel()) * 1.3 + 1).sin().reshape(weights.shape)
                )
        z = (torch.arange(128.0) * 0.7).cos().reshape(1, 2, 8, 8)
        output = net(z, torch.tensor([0.3]), torch.tensor([1]), torch.tensor([[0.5, -1.0, 2.0]]))
    # The numbers have four decimals, and processors round convolutions otherwise.
    torch.testing.assert_close(output.flatten()[::16], torch.tensor(expected), rtol=1e-3, atol=2e-4)


# Published constructor arguments, or one of our classes with its defaults; and the number of parameters.
COUNTS = [
    (DDPMpp, 55_732_739),
    (NCSNpp, 56_395_523),
    (lambda: ADM(num_classes=1000), 295_899_267),
    # Each label has one weight per feature of the noise embedding.
    ({"augment_dim": 9}, 55_732_739 + 9 * 128),
    ({**FOURIER, "augment_dim": 9}, 56_395_523 + 9 * 256),
    (
        {"model_type": "DhariwalUNet", "img_resolution": 64, "channel_mult": [1, 2, 3, 4]},
        295_131_267,
    ),
]


@pytest.mark.parametrize(("described", "parameters"), COUNTS)
def test_published_networks_need_only_nondefault_options(described, parameters):
    with torch.device("meta"):
        net = (
            network_from_config({**PUBLISHED, **described})
            if isinstance(described, dict)
            else described()
        )
    assert sum(p.numel() for p in net.parameters()) == parameters
    if isinstance(described, dict):
        assert net.dropout == 0.1
    # Consistency models need a lower scale than the published diffusion models.
    scale = 16 if isinstance(described, dict) else 0.02
    assert getattr(net, "fourier_scale", scale) == scale


def test_networks_of_all_runs_work_and_learn_at_their_depth():
    nets = [resolved(path)["model"].get("init_args", {}).get("net") for path in RUNS]
    nets += [resolved(path) for path in sorted((CONFIGS / "models").glob("*.yaml"))]
    depths = set()
    for net in filter(None, nets):
        module, _, name = net["class_path"].rpartition(".")
        if name == "Diffusers":  # of other options
            continue
        options = {
            **net["init_args"],
            **({"width": 16, "depth": 2, "heads": 2} if name == "DiT" else {"channels": 8}),
            **({"head_width": 8} if name == "ADM" else {}),
        }
        key = (
            name,
            *(
                str(options.get(option))
                for option in ("multipliers", "blocks", "image_size", "num_classes")
            ),
        )
        if key in depths:
            continue
        depths.add(key)
        torch.manual_seed(0)
        model = awake(getattr(importlib.import_module(module), name)(**options)).train()
        side, channels, classes = (
            getattr(model, "image_size", 8),
            model.in_channels,
            model.num_classes,
        )
        z, noise = torch.randn(2, channels, side, side), torch.tensor([-1.5, 1.0])
        labels = torch.tensor([0, classes - 1]) if classes else None
        augment = torch.randn(2, model.augment_dim) if model.augment_dim else None
        output = model(z, noise, labels, augment)
        assert output.shape == z.shape
        output.square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, (key, name)
            assert p.grad.isfinite().all(), (key, name)
            assert p.grad.any(), (key, name)
    assert {
        ("NCSNpp", "[2, 2, 2]", "4", "32", "0"),
        ("ADM", "[1, 2, 3, 4]", "3", "64", "1000"),
    } <= depths


# Labels


@EVERY_NET
def test_each_item_has_its_own_level_class_and_augmentation(kind):
    net = awake(made(kind, num_classes=4, augment_dim=9)).eval()
    z, noise, labels, augment = (
        torch.randn(3, 3, 8, 8),
        torch.randn(3),
        torch.tensor([0, 1, 2]),
        torch.ones(3, 9),
    )
    base, none = net(z, noise, labels, augment), net(z, noise)
    others = [
        net(z, noise + 1, labels, augment),
        net(z, noise, labels + 1, augment),
        net(z, noise, labels, -augment),
    ]
    for other in others:
        assert ((other - base).flatten(1).norm(dim=1) > 1e-4 * base.flatten(1).norm(dim=1)).all()
    # A convolution rounds otherwise in another batch.
    torch.testing.assert_close(
        net(z[1:2], noise[1:2], labels[1:2], augment[1:2]), base[1:2], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(net(z, noise, None, torch.zeros(3, 9)), none)
    mixed = net(z, noise, torch.tensor([NO_CLASS, 2, NO_CLASS]))
    torch.testing.assert_close(mixed[[0, 2]], none[[0, 2]])
    torch.testing.assert_close(mixed[1], net(z, noise, torch.tensor([0, 2, 0]))[1])
    if kind in (DDPMpp, NCSNpp, ADM):
        # Integer and one-hot labels agree, and zeros are no label.
        torch.testing.assert_close(net(z, noise, torch.eye(4)[labels], augment), base)
        torch.testing.assert_close(net(z, noise, torch.zeros(3, 4)), none)
    for wrong in (-2, 4):
        with pytest.raises((InputError, IndexError)):
            net(z, noise, torch.tensor([0, wrong, 1]))


def test_label_dropout_takes_whole_labels_of_single_items():
    net = awake(made(ADM, num_classes=3, label_dropout=0.3, dropout=0.0))
    z, noise = torch.randn(1, 3, 8, 8), torch.zeros(1)
    # A label of several classes is dropped as a whole.
    label = torch.tensor([[1.0, 1.0, 0.5]])
    batch = [part.repeat(400, *[1] * (part.ndim - 1)) for part in (z, noise, label)]
    with torch.no_grad():
        kept, dropped = net.eval()(z, noise, label), net(z, noise)
        evaluated, outputs = net(*(part[:30] for part in batch)), net.train()(*batch)
    far = (kept - dropped).norm()
    assert ((evaluated - kept).flatten(1).norm(dim=1) < 1e-3 * far).all(), (
        "only training drops labels"
    )
    is_kept, is_dropped = (
        (outputs - other).flatten(1).norm(dim=1) < 1e-3 * far for other in (kept, dropped)
    )
    assert (is_kept ^ is_dropped).all()
    # Five standard deviations of a share of 400 draws
    assert abs(is_dropped.sum() - 120) < 5 * math.sqrt(400 * 0.3 * 0.7)


# First weights, dropout, precision


def assert_glorot(layer, gain, name):
    """The weights are uniform with gain² times Glorot's variance, and the bias is zero."""
    fans = sum(layer.weight.shape[:2]) * layer.weight[0, 0].numel()
    bound = gain * math.sqrt(6 / fans)
    weight = layer.weight.detach().double()
    assert weight.abs().max() <= bound * (1 + 1e-6), name
    # The variance of the squares of uniform numbers is 4/45 of the bound's fourth power.
    deviation = math.sqrt(4 / 45 / weight.numel()) * bound**2
    assert abs(weight.square().mean() - bound**2 / 3) < 5 * deviation, name
    assert layer.bias is None or not layer.bias.any(), name


@SONG
def test_weights_of_song_s_networks_start_as_glorot_s(kind):
    for path, layer in made(kind, channels=32, num_classes=5, augment_dim=9).named_modules():
        name = path.rpartition(".")[2]
        if isinstance(layer, nn.Conv2d | nn.Linear):
            small = name in ("8x8_aux_conv", "conv1", "proj")
            # Song et al.: each of query, key and value has a tenth of the variance for its own fans, C and C.
            gain = math.sqrt(0.1 * 4 / 2) if name == "qkv" else 1e-5 if small else 1.0
            assert_glorot(layer, gain, path)


def test_blocks_of_adm_start_as_their_shortcuts():
    net = made(ADM, num_classes=50, augment_dim=9)
    assert not net.map_augment.weight.any()
    blocks = [layer for layer in net.modules() if isinstance(layer, ADMBlock)]
    assert any(block.heads for block in blocks)
    for block in blocks:
        h = torch.randn(2, block.norm0.num_channels, 4, 4)
        torch.testing.assert_close(block(h, torch.randn(2, 64)), block.skip(h), rtol=0, atol=0)
    # Class embeddings are standard normal: 3200 numbers know their variance to 2.5 %.
    assert net.map_label.weight.var().item() == pytest.approx(1, rel=0.13)


@EVERY_NET
def test_untrained_denoiser_returns_half_of_z_at_sigma_data(
    kind,
):
    net = made(kind)
    z = torch.randn(3, 3, 8, 8)
    # The network returns zero, up to the weights of 1e-5 of DDPM++ and NCSN++, and c_skip = 1/2 at σ = σ_data.
    denoiser = EDMPrecond(net)
    halved = denoiser(z.double(), torch.tensor(0.5))
    torch.testing.assert_close(halved, z / 2, rtol=0, atol=1e-3)
    for sigma in (0.5, torch.full((3,), 0.5), torch.full((3, 1, 1, 1), 0.5)):
        # Kernels depend on strides.
        torch.testing.assert_close(denoiser(z, sigma), halved, rtol=0, atol=1e-5)
    assert denoiser(z, -0.5).isnan().all()  # ln σ in place of σ must not go unseen.


@EVERY_UNET
def test_dropout_drops_its_share_before_the_second_convolution(kind):
    net, second = awake(made(kind, dropout=0.3)).train(), "conv2" if kind is UNet else "conv1"
    z, noise = torch.randn(8, 3, 8, 8), torch.zeros(8)
    for given in inputs_of(net, second, z, noise):
        dropped, numbers = (given == 0).double().mean().item(), given.numel()
        assert abs(dropped - 0.3) < 5 * math.sqrt(0.3 * 0.7 / numbers)
    net.eval()
    assert not any((given == 0).any() for given in inputs_of(net, second, z, noise))
    assert torch.equal(net(z, noise), net(z, noise))


@EVERY_NET
def test_embedding_is_float32_and_channels_last_is_the_same(kind):
    net, layer = (
        awake(made(kind, num_classes=4, augment_dim=9)).eval(),
        "modulation" if kind in (UNet, DiT) else "affine",
    )
    # Neighbouring levels of a fine grid differ by less than bfloat16 resolves.
    arguments = (
        torch.randn(3, 3, 8, 8),
        torch.tensor([0.5, 0.5001, -1.3]),
        torch.arange(3),
        torch.randn(3, 9),
    )
    expected, output = inputs_of(net, layer, *arguments), net(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = inputs_of(net, layer, *arguments)
    assert len(rounded) == len(expected) > 0
    for ours, theirs in zip(rounded, expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours[0], ours[1])
    laid_out = net.to(memory_format=torch.channels_last)(*arguments)
    # Another layout sums in another order.
    torch.testing.assert_close(laid_out, output, rtol=1e-4, atol=1e-5)


# Preconditioning


class Half(nn.Module):
    """A network that returns half of what it gets, and keeps its labels."""

    def forward(self, z_scaled, noise_label, class_label=None):
        self.labels = noise_label, class_label
        return z_scaled / 2


@pytest.mark.parametrize("deviation", [0.3, 1.7])
def test_preconditioning_is_that_of_the_papers(deviation):
    z, t = (
        torch.randn(3, 2, dtype=torch.float64),
        torch.tensor([0.01, 0.4, 30.0], dtype=torch.float64),
    )
    net, column, classes = Half(), t[:, None], torch.arange(3)
    total = column**2 + deviation**2
    # Karras et al. 2022, Table 1.
    expected = deviation**2 / total * z + column * deviation / total.sqrt() * (z / total.sqrt()) / 2
    torch.testing.assert_close(
        EDMPrecond(net, deviation)(z, t).double(), expected, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(net.labels[0].double(), t.log() / 4)
    # Song et al. 2023, Appendix C: the same, with t − t_min in c_skip and c_out.
    above = column - 0.002
    expected = (
        deviation**2 / (above**2 + deviation**2) * z
        + deviation * above / total.sqrt() * (z / total.sqrt()) / 2
    )
    function = ConsistencyFunction(net, deviation)
    torch.testing.assert_close(function(z, t, classes).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.labels[0].double(), t.log() / 4)
    assert net.labels[1] is classes


@pytest.mark.parametrize("t_min", [0.002, 0.7])  # float32 rounds 0.002 up, and 0.7 down
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_consistency_model_is_bitwise_the_identity_at_t_min(t_min, dtype):
    z = torch.randn(4, 3, 8, 8)
    z[0, 0] = 0.0  # next to a zero every small change is visible
    net = made(UNet)
    nn.init.normal_(net.conv_out.weight, std=100)
    model = ConsistencyModel.around(net, (3, 8, 8), sigma_min=t_min)
    assert torch.equal(model(z, torch.full((4,), t_min, dtype=dtype)), z)


@pytest.mark.parametrize("sides", [(20, 20), (33, 33), (5, 7), (9, 16), (1, 1)])
def test_a_unet_takes_images_of_any_size(sides):
    net = awake(made(UNet, multipliers=(1, 2, 2)))
    z = torch.randn(2, 3, *sides, requires_grad=True)
    output = net(z, torch.zeros(2))
    assert output.shape == z.shape
    # Each pixel of the output depends on the pixel at its place, and each one of the input counts.
    (gradient,) = torch.autograd.grad(output.square().sum(), z)
    assert (gradient != 0).all()


# What is refused

CALLS = [
    (DDPMpp, {"class_label": torch.tensor([0, 4, 1])}, "num_classes=4, but a class label is 4"),
    (DDPMpp, {"z_scaled": torch.zeros(3, 3, 16, 16)}, "image_size=8, but the images are 16x16"),
    (
        ADM,
        {"z_scaled": torch.zeros(3, 1, 8, 8)},
        r"in_channels=3, but the images have the shape \(1, 8, 8\)",
    ),
    (
        UNet,
        {"z_scaled": torch.zeros(3, 1, 8, 9)},
        r"in_channels=3, but the images have the shape \(1, 8, 9\)",
    ),
]


def test_bad_inputs_are_named():
    for kind, call, message in CALLS:
        net, given = made(kind, num_classes=4, augment_dim=9), {"z_scaled": torch.zeros(3, 3, 8, 8)}
        with pytest.raises(InputError, match=f"^{kind.__name__}: {message}"):
            net(**{**given, "noise_label": torch.zeros(3), **call})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            UNet,
            {"in_channels": None},
            "UNet: in_channels is None: give it; only a config of a run takes it from",
        ),
        (DDPMpp, {"image_size": None}, "DDPMpp: image_size is None: give it"),
        (UNet, {"blocks": 0}, "UNet: blocks must be at least 1, got 0"),
        (UNet, {"channels": -4}, "UNet: channels must be at least 1, got -4"),
        (UNet, {"multipliers": []}, "UNet: multipliers must be numbers from 1"),
        (UNet, {"dropout": 1.0}, r"UNet: dropout must be in \[0, 1\), got 1.0"),
        (ADM, {"label_dropout": 1.5}, r"ADM: label_dropout must be in \[0, 1\), got 1.5"),
        (
            NCSNpp,
            {"image_size": 30},
            "image_size must be a multiple of 4 with 3 multipliers, got 30",
        ),
        (
            ADM,
            {"channels": 32, "multipliers": (1, 1, 1)},
            "head_width must divide the 32 channels .* got 64",
        ),
    ],
)
def test_bad_options_are_named(kind, options, message):
    with torch.device("meta"), pytest.raises(InputError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "VPUNet"}, "model_type must be one of SongUNet, DhariwalUNet, got VPUNet"),
        ({"embedding_type": "fourier"}, "neither DDPM"),
    ],
)
def test_configurations_nobody_published_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        network_from_config({**PUBLISHED, **config})
