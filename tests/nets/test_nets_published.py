"""More tests of DDPM++, NCSN++ and ADM: labels, precision, published configurations, and messages for bad input."""

import pytest
import torch
from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet, network_from_config
from lit_knn.nets.layers import fir_kernel, resample
from lit_knn.nets.precond import EDMPrecond

SMALL = {"image_size": 8, "in_channels": 3, "multipliers": (1, 2), "blocks": 1, "attention_at": (4,), "dropout": 0.1}
NETS = pytest.mark.parametrize("kind", [DDPMpp, NCSNpp, ADM], ids=lambda kind: kind.__name__)


def small(kind, **options):
    """A tiny network in evaluation mode; its zero layers have other weights."""
    options = {**SMALL, "channels": 16, **options}
    if kind is ADM:
        options |= {"head_width": 16}
    net = kind(**options).eval()
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    return net


def inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.randn(batch, generator=generator)


def relative_error(output, expected):
    return ((output - expected).norm() / expected.norm()).item()


@NETS
def test_noise_level_class_and_augmentation_change_the_output(kind):
    net = small(kind, num_classes=4, augment_dim=9)
    z, noise = inputs()
    labels, augment = torch.tensor([0, 1, 2]), torch.ones(3, 9)
    base = net(z, noise, labels, augment)
    others = [net(z, noise + 1, labels, augment), net(z, noise, labels + 1, augment), net(z, noise, labels, -augment)]
    for other in others:
        assert relative_error(other, base) > 1e-4
    # Integer and one-hot labels agree, and zeros are no label.
    torch.testing.assert_close(net(z, noise, labels), net(z, noise, torch.eye(4)[labels]))
    torch.testing.assert_close(net(z, noise), net(z, noise, torch.zeros(3, 4), torch.zeros(3, 9)))


@NETS
def test_bf16_autocast_and_channels_last_agree_with_float32(kind):
    net = small(kind, num_classes=4)
    z, noise = inputs()
    labels = torch.tensor([0, 1, 2])
    expected = net(z, noise, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(net(z, noise, labels).float(), expected) < 0.02
    net = net.to(memory_format=torch.channels_last)
    output = net(z.to(memory_format=torch.channels_last), noise, labels)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_resampling_keeps_the_brightness():
    for direction, taps in (("up", (1, 1)), ("up", (1, 3, 3, 1)), ("down", (1, 1)), ("down", (1, 3, 3, 1))):
        resampled = resample(torch.ones(1, 2, 16, 16), fir_kernel(taps), direction)
        assert resampled.shape[-1] == {"up": 32, "down": 8}[direction]
        torch.testing.assert_close(resampled[..., 2:-2, 2:-2], torch.ones_like(resampled[..., 2:-2, 2:-2]))


def test_the_denoiser_takes_any_network_and_one_noise_level_for_all():
    denoiser = EDMPrecond(UNet(3, channels=8, num_classes=2, blocks=1)).eval()
    z, _ = inputs()
    sigma = torch.tensor(0.5)
    # The untrained UNet returns zero, and c_skip = 1/2 at sigma = sigma_data.
    torch.testing.assert_close(denoiser(z.double(), sigma, torch.tensor([0, 1, 1])), z / 2)
    net = EDMPrecond(small(DDPMpp, augment_dim=9))
    torch.testing.assert_close(net(z, sigma), net(z, sigma.expand(3), None, torch.zeros(3, 9)))


BAD_INPUTS = [
    ({"class_label": torch.tensor([0, 4, 1])}, "num_classes=4, but a class label is 4"),
    ({"class_label": torch.tensor([0, -2, 1])}, "num_classes=4, but a class label is -2"),
    ({"class_label": torch.zeros(3, 5)}, r"num_classes=4 and 3 images need .* got \(3, 5\)"),
    ({"class_label": torch.tensor([0])}, r"num_classes=4 and 3 images need .* got \(1,\)"),
    ({"augment_label": torch.zeros(3, 5)}, r"augment_dim=9, but the augmentation labels are \(3, 5\)"),
    ({"z_scaled": torch.zeros(3, 3, 16, 16)}, "image_size=8, but the images are 16x16"),
    ({"z_scaled": torch.zeros(3, 1, 8, 8)}, r"in_channels=3, but the images have the shape \(1, 8, 8\)"),
]


@NETS
def test_bad_inputs_are_named(kind):
    net, (z, noise) = small(kind, num_classes=4, augment_dim=9), inputs()
    for call, message in BAD_INPUTS:
        with pytest.raises(InputError, match=f"^{kind.__name__}: {message}"):
            net(**{"z_scaled": z, "noise_label": noise, **call})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DDPMpp, {"channels": 0}, "DDPMpp: channels must be at least 1, got 0"),
        (DDPMpp, {"multipliers": ()}, "multipliers must be 1 to 16 numbers of at least 1"),
        (UNet, {"channels": 0}, "channels"),
        (UNet, {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        (NCSNpp, {"image_size": 30}, "image_size must be a multiple of 4 with 3 multipliers, got 30"),
        (NCSNpp, {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        (NCSNpp, {"label_dropout": -0.1}, r"label_dropout must be in \[0, 1\), got -0.1"),
        (ADM, {"num_classes": -1}, "num_classes must be at least 0, got -1"),
        (ADM, {"channels": 32, "multipliers": (1, 1, 1)}, "head_width must divide the 32 channels .* got 64"),
        (ADM, {"channels": 130}, "a layer of 130 channels cannot be normalised in 32 groups"),
    ],
)
def test_bad_options_are_named(kind, options, message):
    with torch.device("meta"), pytest.raises(InputError, match=message):
        kind(**options)


PUBLISHED = {"model_type": "SongUNet", "img_resolution": 32, "img_channels": 3, "channel_mult": [2, 2, 2]}
FOURIER = {"embedding_type": "fourier", "encoder_type": "residual", "channel_mult_noise": 2}
FOURIER |= {"resample_filter": (1, 3, 3, 1)}


@pytest.mark.parametrize(
    ("config", "expected", "parameters"),
    [
        ({"use_fp16": False, "sigma_data": 0.5, "label_dim": 0}, DDPMpp, 55_732_739),
        (FOURIER, NCSNpp, 56_395_523),
        ({"model_type": "DhariwalUNet", "img_resolution": 64, "channel_mult": [1, 2, 3, 4]}, ADM, 295_131_267),
    ],
)
def test_published_configurations_need_only_what_differs_from_the_defaults(config, expected, parameters):
    with torch.device("meta"):
        net = network_from_config({**PUBLISHED, **config})
    assert type(net) is expected
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net.dropout == 0.1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "VPUNet"}, "model_type must be one of SongUNet, DhariwalUNet, got VPUNet"),
        ({"embedding_type": "fourier"}, "neither DDPM"),
        ({"colour": "blue"}, "SongUNet has no option colour, whose value is blue"),
        ({"channel_mult_emb": 2}, "channel_mult_emb must be 4"),
        ({"img_channels": "three"}, "an option of the wrong type"),
    ],
)
def test_configurations_nobody_published_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        network_from_config({**PUBLISHED, **config})
