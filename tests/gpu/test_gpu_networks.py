"""Networks, samplers and features on a GPU, or on its stand-in, compute what they compute on the CPU."""

import copy

import pytest
import torch
import yaml

from lit_knn.estimators import Exact, Network
from lit_knn.metrics import EfficientNetLite0, InceptionV3
from lit_knn.nets.precond import EDMPrecond
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.hybrid_sampler import hybrid_sampler
from lit_knn.sampling.samplers import consistency_sampler, heun_sampler
from tests import ROOT
from tests.every_estimator import made
from tests.networks import write_own
from tests.toys import pixels

pytestmark = pytest.mark.gpu

# Models of diffusers are tested in tests/nets/test_diffusers.py.
MODELS = [
    path
    for path in sorted((ROOT / "configs" / "models").glob("*.yaml"))
    if not path.stem.startswith("diffusers")
]
SMALL = {
    "image_size": 16,
    "channels": 16,
    "multipliers": [1, 2],
    "blocks": 1,
    "attention_at": [8],
    "head_width": 8,
    "width": 16,
    "depth": 2,
    "heads": 2,
}
# A GPU may multiply float32 numbers of 10 bits in convolutions.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def rng():
    return torch.Generator().manual_seed(1)


def gradients(net, device, channels):
    """Output, and gradients of all weights, of one call with a noise level, a class and an augmentation each."""
    net, generator = copy.deepcopy(net).to(device), rng()
    x, t = torch.randn(3, channels, 16, 16, generator=generator), torch.tensor([0.1, 2.0, 40.0])
    options = {"class_label": torch.arange(3).to(device)}
    width = getattr(net, "augment_dim", 0)
    options |= (
        {"augment_label": torch.randn(3, width, generator=generator).to(device)} if width else {}
    )
    output = EDMPrecond(net)(x.to(device), t.to(device), **options)
    output.square().mean().backward()
    return output, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_network_and_its_gradients_are_those_of_the_cpu(path):
    recipe = yaml.safe_load(path.read_text())
    net = made(recipe, **SMALL, num_classes=5, dropout=0.0)
    for parameter in net.parameters():  # the last layers start at or near zero
        torch.nn.init.normal_(parameter, std=0.05)
    channels = recipe["init_args"]["in_channels"]
    (ours, our_grads), (theirs, their_grads) = (
        gradients(net, device, channels) for device in ("cuda", "cpu")
    )
    assert ours.is_cuda
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **CLOSE)
    assert our_grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        size = grad.abs().max().item()
        torch.testing.assert_close(
            our_grads[name].cpu(), grad, rtol=0, atol=1e-2 * size + 1e-9, msg=name
        )


def test_a_network_of_a_file_moves_to_the_latents(tmp_path):
    path = write_own(tmp_path / "net.ckpt")
    network, z = Network(path), torch.randn(2, 1, 8, 8, generator=rng()) * 3
    expected = network.posterior_mean(z, 2.0)
    for device in ("cuda", "cpu", "cuda"):
        mean = network.posterior_mean(z.to(device), torch.tensor([2.0, 2.0], device=device))
        assert mean.device.type == device
        torch.testing.assert_close(mean.cpu(), expected, **CLOSE)
    # As EDM's code does on GPUs; half precision has 11 bits.
    half = Network(path, fp16=True).posterior_mean(z.cuda(), 2.0)
    torch.testing.assert_close(half.cpu(), expected, rtol=0.05, atol=0.05)


SAMPLERS = {
    "heun": lambda mean, noise: heun_sampler(mean, noise, num_steps=6),
    "hybrid": lambda mean, noise: hybrid_sampler(mean, mean, noise, t_switch=2.0, num_steps=6),
    "consistency": lambda mean, noise: consistency_sampler(
        mean, torch.stack([noise, noise.flip(0)]), (80.0, 0.8)
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_those_of_the_cpu(name):
    def samples(device):
        reference = ReferenceSet(pixels(20)).to(torch.device(device))
        noise = torch.randn(4, *reference.shape, generator=rng()).to(device)
        return SAMPLERS[name](Exact().bind(reference).posterior_mean, noise)

    torch.testing.assert_close(samples("cuda").cpu(), samples("cpu"), **CLOSE)


def test_features_of_networks_are_those_of_the_cpu(random_weights):
    x = ReferenceSet(pixels(2, (3, 32, 32))).gather(torch.arange(2))
    for extractor in (InceptionV3(random_weights), EfficientNetLite0()):
        found = {}
        for device in ("cpu", "cuda"):
            extractor.load((3, 32, 32), device)
            found[device] = [part for part in extractor(x.to(device)) if part is not None]
        for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
            assert ours.is_cuda
            # A GPU may multiply numbers of 10 bits in some hundred layers.
            torch.testing.assert_close(
                ours.cpu(), theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item()
            )
