"""Networks at the depth of the runs, with few channels; their first weights, dropout, labels and half precision."""

import importlib
import math

import pytest
import torch
from torch import nn

from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from lit_knn.nets.adm import ADMBlock
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.nets.song_unet import SongBlock
from tests.config_files import CONFIGS, RUNS, resolved

SMALL = {"image_size": 8, "multipliers": (1, 2), "blocks": 1, "attention_at": (4,)}
# A network's options, and the layers at which its blocks take the embedding and apply dropout.
KINDS = {
    DDPMpp: ({**SMALL, "channels": 16}, "affine", "conv1"),
    NCSNpp: ({**SMALL, "channels": 16}, "affine", "conv1"),
    ADM: ({**SMALL, "channels": 16, "head_width": 16}, "affine", "conv1"),
    UNet: ({"channels": 16, "multipliers": (1, 2), "blocks": 1}, "modulation", "conv2"),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def made(kind, **options):
    torch.manual_seed(0)
    return kind(**KINDS[kind][0], **options)


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
    hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach())) for layer in layers]
    net(*arguments)
    for hook in hooks:
        hook.remove()
    return seen


def test_the_pyramid_of_images_is_carried_on():
    # EDM's networks.py: at each halving, aux = x = (x + shrink(aux)) / sqrt(2), where aux begins as the image.
    net = NCSNpp(image_size=16, channels=8, multipliers=(1, 2, 2, 2), blocks=1, attention_at=())
    net = awake(net).eval()
    seen = {}
    for name, layer in net.enc.items():
        layer.register_forward_hook(lambda _, given, output, name=name: seen.update({name: (given[0], output)}))
    image = torch.randn(2, 3, 16, 16)
    net(image, torch.zeros(2))
    aux = image
    for side in (8, 4, 2):
        given, shrunken = seen[f"{side}x{side}_aux_residual"]
        torch.testing.assert_close(given, aux)
        aux = (seen[f"{side}x{side}_down"][1] + shrunken) / math.sqrt(2)
        torch.testing.assert_close(seen[f"{side}x{side}_block0"][0], aux)


@pytest.mark.parametrize("kind", [DDPMpp, NCSNpp])
def test_a_label_shifts_the_embedding_by_its_column_times_the_root_of_the_classes(kind):
    net, plain = awake(made(kind, num_classes=9)).eval(), made(kind).eval()
    weights = {name: value for name, value in net.state_dict().items() if "map_label" not in name}
    z, noise = torch.randn(3, 3, 8, 8), torch.tensor([-1.0, 0.0, 1.0])
    for label in (None, 0, 7):
        shift = net.map_label.bias + (0 if label is None else 3 * net.map_label.weight[:, label])
        bias = net.map_layer0.bias + net.map_layer0.weight @ shift
        plain.load_state_dict({**weights, "map_layer0.bias": bias})
        labels = None if label is None else torch.full((3,), label)
        torch.testing.assert_close(net(z, noise, labels), plain(z, noise), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("kind", [DDPMpp, NCSNpp])
def test_weights_of_song_s_networks_start_as_glorot_s(kind):
    torch.manual_seed(0)
    net = kind(**SMALL, channels=32, num_classes=5, augment_dim=9)
    for path, layer in net.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(layer, nn.Conv2d | nn.Linear):
            small = name in ("8x8_aux_conv", "conv1", "proj")
            # Song et al.: each of query, key and value has a tenth of the variance for its own fans, C and C.
            gain = math.sqrt(0.1 * 4 / 2) if name == "qkv" else 1e-5 if small else 1.0
            assert_glorot(layer, gain, path)
    # A block is nearly its shortcut.
    block = next(layer for layer in net.modules() if isinstance(layer, SongBlock) and layer.heads)
    h = torch.randn(2, block.norm0.num_channels, 4, 4)
    expected = block.skip(h) / 2  # Two sums are divided by √2.
    torch.testing.assert_close(block(h, torch.randn(2, 4 * 32)), expected, rtol=1e-3, atol=1e-3)


def test_blocks_of_adm_start_as_their_shortcuts():
    net = made(ADM, num_classes=50)
    blocks = [layer for layer in net.modules() if isinstance(layer, ADMBlock)]
    assert any(block.heads for block in blocks)
    for block in blocks:
        h = torch.randn(2, block.norm0.num_channels, 4, 4)
        torch.testing.assert_close(block(h, torch.randn(2, 64)), block.skip(h), rtol=0, atol=0)
    assert not net(torch.randn(2, 3, 8, 8), torch.zeros(2)).any()
    # Class embeddings are standard normal: 3200 numbers know their variance to 2.5 %.
    assert net.map_label.weight.var().item() == pytest.approx(1, rel=0.13)


@EVERY_KIND
def test_dropout_drops_its_share_before_the_second_convolution(kind):
    net = awake(made(kind, dropout=0.3)).train()
    z, noise = torch.randn(8, 3, 8, 8), torch.zeros(8)
    for given in inputs_of(net, KINDS[kind][2], z, noise):
        dropped, numbers = (given == 0).double().mean().item(), given.numel()
        assert abs(dropped - 0.3) < 5 * math.sqrt(0.3 * 0.7 / numbers)
    assert not torch.equal(net(z, noise), net(z, noise))
    net.eval()
    assert not any((given == 0).any() for given in inputs_of(net, KINDS[kind][2], z, noise))
    assert torch.equal(net(z, noise), net(z, noise))


@EVERY_KIND
def test_the_embedding_is_float32_under_autocast(kind):
    net = awake(made(kind, num_classes=4, augment_dim=9)).eval()
    # Neighbouring levels of a fine grid differ by less than bfloat16 resolves.
    arguments = torch.randn(3, 3, 8, 8), torch.tensor([0.5, 0.5001, -1.3]), torch.arange(3), torch.randn(3, 9)
    expected = inputs_of(net, KINDS[kind][1], *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = inputs_of(net, KINDS[kind][1], *arguments)
    assert len(rounded) == len(expected) > 0
    for ours, theirs in zip(rounded, expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours[0], ours[1])


def attention_by_hand(qkv, heads):
    """Softmax attention of each head; the rows of a head are query, key and value of each of its channels."""
    batch, triple, height, width = qkv.shape
    q, k, v = qkv.reshape(batch, heads, triple // (3 * heads), 3, height * width).unbind(3)
    weights = torch.einsum("bhcq,bhck->bhqk", q, k).div(math.sqrt(q.shape[2])).softmax(3)
    return torch.einsum("bhqk,bhck->bhcq", weights, v).reshape(batch, triple // 3, height, width)


@pytest.mark.parametrize(("kind", "channels_of_head"), [(DDPMpp, None), (NCSNpp, None), (ADM, 16)])
def test_heads_are_one_or_of_the_width_asked_for(kind, channels_of_head):
    net, found = awake(made(kind)).eval(), []
    for block in net.modules():
        if hasattr(block, "qkv"):
            block.qkv.register_forward_hook(lambda _, given, output: found.append(output))
            block.proj.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    net(torch.randn(2, 3, 8, 8), torch.zeros(2))
    assert len(found) >= 4
    for qkv, attended in zip(found[::2], found[1::2], strict=True):
        heads = 1 if channels_of_head is None else attended.shape[1] // channels_of_head
        torch.testing.assert_close(attended, attention_by_hand(qkv, heads), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [DDPMpp, NCSNpp, ADM])
def test_label_dropout_takes_whole_labels_of_single_items(kind):
    net = awake(made(kind, num_classes=3, label_dropout=0.3, dropout=0.0))
    z, noise = torch.randn(1, 3, 8, 8), torch.zeros(1)
    # A label of several classes is dropped as a whole.
    label = torch.tensor([[1.0, 1.0, 0.5]])
    batch = [part.repeat(400, *[1] * (part.ndim - 1)) for part in (z, noise, label)]
    with torch.no_grad():
        kept, dropped = net.eval()(z, noise, label), net(z, noise)
        evaluated, outputs = net(*(part[:30] for part in batch)), net.train()(*batch)
    far = (kept - dropped).norm()
    assert ((evaluated - kept).flatten(1).norm(dim=1) < 1e-3 * far).all(), "only training drops labels"
    is_kept, is_dropped = ((outputs - other).flatten(1).norm(dim=1) < 1e-3 * far for other in (kept, dropped))
    assert (is_kept ^ is_dropped).all()
    assert abs(is_dropped.sum() - 120) < 5 * math.sqrt(400 * 0.3 * 0.7)


class Half(nn.Module):
    """A network that returns half of what it gets, and keeps its noise label."""

    def forward(self, z_scaled, noise_label, class_label=None):
        self.noise_label = noise_label
        return z_scaled / 2


@pytest.mark.parametrize("deviation", [0.3, 1.7])
def test_preconditioning_uses_the_deviation_of_the_data(deviation):
    z, t = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0.01, 0.4, 30.0], dtype=torch.float64)
    net, column = Half(), t[:, None]
    total = column**2 + deviation**2
    # Karras et al. 2022, Table 1.
    expected = deviation**2 / total * z + column * deviation / total.sqrt() * (z / total.sqrt()) / 2
    torch.testing.assert_close(EDMPrecond(net, deviation)(z, t).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.noise_label.double(), t.log() / 4)
    # Song et al. 2023, Appendix C: the same, with t − t_min in c_skip and c_out.
    above = column - 0.002
    expected = deviation**2 / (above**2 + deviation**2) * z + deviation * above / total.sqrt() * (z / total.sqrt()) / 2
    torch.testing.assert_close(ConsistencyFunction(net, deviation)(z, t).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_unet_computes_what_its_checkpoints_were_trained_with():
    net = UNet(2, channels=4, multipliers=(1, 2), blocks=1, num_classes=2, augment_dim=3)
    with torch.no_grad():
        for weights in net.parameters():
            weights.copy_((torch.arange(weights.numel()) * 1.3 + 1).sin().reshape(weights.shape) / 2)
        z = (torch.arange(32.0) * 0.7).cos().reshape(1, 2, 4, 4)
        output = net(z, torch.tensor([0.3]), torch.tensor([1]), torch.tensor([[0.5, -1.0, 2.0]]))
    recorded = torch.tensor([0.0691, 0.7602, -0.0341, 0.7164, 0.8335, 0.0034, 0.6227, 0.2263])
    torch.testing.assert_close(output.flatten()[::4], recorded, rtol=1e-3, atol=1e-3)


def test_networks_of_all_runs_work_and_learn_at_their_depth():
    nets = [resolved(path)["model"].get("init_args", {}).get("net") for path in RUNS]
    nets += [resolved(path) for path in sorted((CONFIGS / "models").glob("*.yaml"))]
    depths = set()
    for net in filter(None, nets):
        module, _, name = net["class_path"].rpartition(".")
        options = {**net["init_args"], "channels": 8, **({"head_width": 8} if name == "ADM" else {})}
        key = (name, *(str(options.get(option)) for option in ("multipliers", "blocks", "image_size", "num_classes")))
        if key in depths:
            continue
        depths.add(key)
        torch.manual_seed(0)
        model = awake(getattr(importlib.import_module(module), name)(**options)).train()
        side, channels, classes = getattr(model, "image_size", 8), model.in_channels, model.num_classes
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
    assert {("NCSNpp", "[2, 2, 2]", "4", "32", "0"), ("ADM", "[1, 2, 3, 4]", "3", "64", "1000")} <= depths
    assert {("DDPMpp", "[2, 2, 2]", "4", "32", "0"), ("DDPMpp", "[1, 2, 2, 2]", "4", "64", "0")} <= depths
