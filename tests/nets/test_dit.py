"""The diffusion transformer: published sizes, patches, attention, forward derivatives and first weights."""

import math

import pytest
import torch
import yaml
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_knn.common.errors import InputError
from lit_knn.nets import DiT
from lit_knn.nets.dit import TransformerBlock, from_patches, positions, to_patches
from tests.config_files import CONFIGS

# Peebles & Xie 2023, Table 4, and the exact number of their XL/2 in the published code's log.
PUBLISHED = {"dit_s2": 33.0e6, "dit_b2": 130.5e6, "dit_l2": 458.1e6, "dit_xl2": 675_129_632}
LATENT_PATCHES = 16 * 16


def awake(net):
    """The network with ordinary weights in the layers that start at zero."""
    torch.manual_seed(0)
    for weights in net.parameters():
        torch.nn.init.normal_(weights, std=0.2)
    return net


def options_of(name):
    return yaml.safe_load((CONFIGS / "models" / f"{name}.yaml").read_text())["init_args"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published_but_for_named_parts(name):
    options = options_of(name)
    with torch.device("meta"):
        net = DiT(**options)
    number = sum(weights.numel() for weights in net.parameters())

    assert number == pytest.approx(PUBLISHED[name], rel=0.02)
    # Theirs also put out a variance, embed "no class", and store the positions; only ours scales queries and keys.
    width, outputs = options["width"], options["in_channels"] * options["patch_size"] ** 2
    theirs = number + outputs * (width + 1) + width + LATENT_PATCHES * width
    theirs -= options["depth"] * 2 * (width // options["heads"])
    exact = PUBLISHED[name] > 600e6
    assert theirs == pytest.approx(PUBLISHED[name], abs=0 if exact else 0.05e6)


def test_patches_are_those_of_pixel_unshuffle():
    images = torch.randn(2, 3, 6, 8)
    patches = to_patches(images, 2)
    torch.testing.assert_close(patches, F.pixel_unshuffle(images, 2).flatten(2).transpose(1, 2))
    assert torch.equal(from_patches(patches, 3, 4, 2), images)


def test_positions_differ_and_products_depend_on_distance():
    grid = positions(5, 7, 16, torch.device("cpu")).double().reshape(5, 7, 16)
    # sin a sin b + cos a cos b = cos(a − b), so products depend on the distance alone.
    step = (grid[1:, 1:] * grid[:-1, :-1]).sum(2)
    torch.testing.assert_close(step, step[:1, :1].expand_as(step), rtol=0, atol=1e-5)
    assert torch.cdist(grid.flatten(0, 1), grid.flatten(0, 1)).fill_diagonal_(9).amin() > 0.1


def test_positions_are_those_of_diffusers():
    expected = get_2d_sincos_pos_embed(16, (5, 5), base_size=5, output_type="pt")
    given = positions(5, 5, 16, torch.device("cpu"))
    torch.testing.assert_close(given, expected.float().view_as(given), rtol=1e-5, atol=1e-5)


def test_attention_is_the_softmax_of_normalised_queries_and_keys():
    block = awake(TransformerBlock(12, 3)).double()
    h = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = block.qkv(h).chunk(3, dim=2)
    heads = []
    for head in range(3):
        features = slice(4 * head, 4 * head + 4)
        query = F.normalize(q[..., features], dim=2) * 2 * block.scale_q
        key = F.normalize(k[..., features], dim=2) * 2 * block.scale_k
        weights = torch.softmax(query @ key.transpose(1, 2) / math.sqrt(4), dim=2)
        heads.append(weights @ v[..., features])
    expected = block.proj(torch.cat(heads, dim=2))
    torch.testing.assert_close(block.attention(h), expected, rtol=1e-4, atol=1e-6)


def test_forward_derivative_is_that_of_finite_differences():
    net = awake(DiT(width=16, depth=2, heads=2, num_classes=3, augment_dim=8)).double()
    z, dz = torch.randn(2, 2, 3, 8, 6, dtype=torch.float64)
    label, dlabel = torch.randn(2, 2, dtype=torch.float64)

    def output(z, label):
        return net(z, label, torch.tensor([2, -1]), torch.ones(2, 8, dtype=torch.float64))

    with sdpa_kernel(SDPBackend.MATH):
        _, derivative = torch.func.jvp(output, (z, label), (dz, dlabel))
    step = 1e-5
    above, below = (
        output(z + step * dz, label + step * dlabel),
        output(z - step * dz, label - step * dlabel),
    )
    torch.testing.assert_close(derivative, (above - below) / (2 * step), rtol=1e-5, atol=1e-7)


def test_blocks_start_as_the_identity_and_the_output_at_zero():
    net = DiT(width=16, depth=2, heads=2, num_classes=3)
    h = torch.randn(2, 5, 16)
    for block in net.blocks:
        assert torch.equal(block(h, torch.randn(2, 16)), h)
    z = torch.randn(2, 3, 8, 8)
    assert not net(z, torch.zeros(2), torch.tensor([0, 1])).any()


@pytest.mark.parametrize("sides", [(2, 2), (8, 8), (6, 10)])
def test_every_pixel_depends_on_every_pixel_at_any_size(sides):
    net = awake(DiT(width=16, depth=2, heads=2))
    z = torch.randn(1, 3, *sides, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(z, torch.zeros(1))[0, 0, 0, 0], z)
    assert (gradient != 0).all()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"width": 18, "heads": 3}, "width must be a multiple of heads=3 and of 4, got 18"),
        ({"heads": 0}, "DiT: heads must be at least 1, got 0"),
        ({"patch_size": 3}, "patch_size=3 does not divide images of 8x8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, line):
    with pytest.raises(InputError, match=line):
        DiT(**{"width": 12, "heads": 3, "depth": 1, **options})(
            torch.zeros(1, 3, 8, 8), torch.zeros(1)
        )
