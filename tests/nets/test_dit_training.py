"""The diffusion transformer with all modules, in mixed precision and compiled; memory of a step."""

import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lit_knn.callbacks import NetworkSpeed
from lit_knn.data import Digits
from lit_knn.estimators import KNN
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT, LitMeanFlow
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.nets import DiT
from tests.networks import write_start
from tests.short_training import train


def tiny(**options):
    """A transformer for the digits whose last layers do not start at zero."""
    torch.manual_seed(0)
    net = DiT(1, width=16, depth=2, heads=2, num_classes=10, **options)
    for weights in net.parameters():
        torch.nn.init.normal_(weights, std=0.1)
    return net


def digits():
    return Digits(batch_size=8)


def model_of(module, folder, warped=False):
    """A conditional model, with or without warped items; LitECT begins with a file in `folder`."""
    augmentation = GeometricAugmentation(p=0.5) if warped else None
    augment_dim = 9 * warped + 8 * (module is LitMeanFlow)
    net = tiny(augment_dim=augment_dim)
    estimator = KNN(32, 8)

    if module is LitECT:
        start = write_start(folder / "start.ckpt", net)
        return LitECT(estimator, start, net, class_conditional=True)
    if module is LitICT:
        return LitICT(net, estimator, class_conditional=True, total_steps=2)
    return module(net, estimator, class_conditional=True, augmentation=augmentation)


def assert_trains(model, **trainer_args):
    """Train two steps; all weights stay finite, some change, and samples can be drawn."""
    before = [weights.clone() for weights in model.network.parameters()]
    train(model, digits(), 2, **trainer_args)

    after = list(model.network.parameters())
    assert all(weights.isfinite().all() for weights in after)
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    samples = model.sample([0, 1])
    assert samples.shape == (2, 1, 8, 8)
    assert samples.isfinite().all()


EVERY_MODULE = pytest.mark.parametrize("module", [LitICT, LitECT, LitEDM, LitFlow, LitMeanFlow])


@EVERY_MODULE
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_all_modules_train_a_transformer(module, precision, tmp_path):
    plugins = [MixedPrecision(precision, "cpu")] if precision == "bf16-mixed" else []
    assert_trains(model_of(module, tmp_path), plugins=plugins)


@pytest.mark.parametrize("module", [LitEDM, LitFlow, LitMeanFlow])
def test_modules_train_a_transformer_with_warped_items(module, tmp_path):
    assert_trains(model_of(module, tmp_path, warped=True))


def losses(model, *callbacks):
    """The losses of two steps."""
    seen = []
    model.log = lambda name, value, **_: seen.append(value.item()) if name == "train/loss" else None
    train(model, digits(), 2, callbacks=list(callbacks))
    return seen


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_transformer_trains_as_a_plain_one(backend, tmp_path):
    torch.compiler.reset()
    compiled = model_of(LitFlow, tmp_path)
    seen = losses(compiled, NetworkSpeed(backend=backend))
    assert compiled.network._compiled_call_impl is not None
    # A compiled network rounds otherwise.
    assert seen == pytest.approx(losses(model_of(LitFlow, tmp_path)), rel=1e-4)


class LargestTensor(TorchDispatchMode):
    """Records how many numbers the largest tensor has, in forward and backward operations."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def largest_tensor(net, side):
    """The largest tensor of a forward and a backward pass for one image of this side."""
    with LargestTensor() as recorded:
        net(torch.randn(1, 1, side, side), torch.zeros(1)).square().mean().backward()
    return recorded.largest


def test_memory_of_a_step_grows_with_the_patches_alone():
    net = tiny(patch_size=1)
    assert largest_tensor(net, 32) == 4 * largest_tensor(net, 16)
    # The plain kernel stores the weights of all pairs.
    with sdpa_kernel(SDPBackend.MATH):
        assert largest_tensor(net, 32) == 16 * largest_tensor(net, 16)
