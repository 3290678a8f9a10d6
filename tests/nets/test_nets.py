import pytest
import torch

from lit_knn.nets import ConvResNet, ConvUNet, UNet
from lit_knn.nets.base import NO_CLASS


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32), (2, 64), (5, 16), (3, 28)])
def test_unet_keeps_the_shape_of_any_images(channels, side):
    net = UNet(channels, channels=8, blocks=1)
    assert net(torch.randn(2, channels, side, side), torch.zeros(2)).shape == (2, channels, side, side)


def test_unet_starts_at_zero_and_every_parameter_learns():
    net = UNet(1, channels=8, num_classes=10, blocks=1)
    z, noise, labels = torch.randn(4, 1, 8, 8), torch.randn(4), torch.arange(4)
    assert torch.count_nonzero(net(z, noise, labels)) == 0
    # The zero layers pass no gradient at first; a few steps change them, and all layers get gradients.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (net(z, noise, labels) - torch.randn(4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    without_gradient = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert without_gradient == []


def test_unet_output_depends_on_noise_level_class_and_its_own_item():
    net = UNet(1, channels=8, num_classes=3, blocks=1)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    z, noise, labels = torch.randn(3, 1, 8, 8), torch.randn(3), torch.tensor([0, 1, 2])
    base = net(z, noise, labels)
    torch.testing.assert_close(net(z, noise, torch.full((3,), NO_CLASS)), net(z, noise))  # no class at all
    for other in (net(z, noise + 1, labels), net(z, noise, labels.roll(1))):
        assert ((base - other).flatten(1).abs().amax(1) > 1e-4).all()
    torch.testing.assert_close(base[1:2], net(z[1:2], noise[1:2], labels[1:2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("net", [ConvResNet(1, 8, layers=2), ConvUNet(1, 8, (1, 2))])
def test_convolutional_nets_see_only_their_surroundings(net):
    """The gradient of an output pixel is zero outside the receptive field, at every depth of the residual net."""
    torch.manual_seed(0)
    torch.nn.init.normal_(net.conv_out.weight)
    z = torch.randn(1, 1, 32, 32, requires_grad=True)
    net(z, torch.zeros(1))[0, 0, 16, 16].backward()
    seen = z.grad[0, 0].ne(0).nonzero()
    extents = (seen.max(0).values - seen.min(0).values + 1).tolist()
    if isinstance(net, ConvResNet):
        assert extents == [9, 9], "2·(layers + 2) + 1"
    else:
        assert max(extents) < 32


def test_the_residual_net_commutes_with_shifts_inside_the_image():
    torch.manual_seed(0)
    net = ConvResNet(2, 8, layers=2)
    torch.nn.init.normal_(net.conv_out.weight)
    z, label = torch.randn(1, 2, 20, 20), torch.tensor([0.3])
    shifted = net(z.roll((2, 3), (2, 3)), label)
    assert torch.allclose(shifted[..., 6:-4, 7:-4], net(z, label).roll((2, 3), (2, 3))[..., 6:-4, 7:-4], atol=1e-5)


@pytest.mark.parametrize("family", [ConvResNet, ConvUNet])
def test_convolutional_nets_take_classes_and_start_at_zero(family):
    net = family(1, 8, num_classes=3, augment_dim=2)
    z, label = torch.randn(2, 1, 8, 8), torch.zeros(2)
    assert net(z, label, torch.tensor([0, 2]), torch.zeros(2, 2)).abs().max() == net.conv_out.bias.abs().max()
    torch.nn.init.normal_(net.conv_out.weight)
    one, other = net(z, label, torch.tensor([0, 0])), net(z, label, torch.tensor([1, 1]))
    assert not torch.allclose(one, other)
    assert not torch.allclose(one, net(z, label + 1, torch.tensor([0, 0])))


def test_the_second_layer_of_the_convolutional_unet_is_residual():
    net = ConvUNet(1, 8, (1, 2))
    torch.nn.init.normal_(net.conv_out.weight)
    z, label = torch.randn(2, 1, 8, 8), torch.zeros(2)
    for name, parameter in net.named_parameters():
        if "second.conv" in name:
            torch.nn.init.zeros_(parameter)
    # Without the sum a network whose second layers are zero would not see z.
    assert not torch.allclose(net(z, label), net(-z, label))
