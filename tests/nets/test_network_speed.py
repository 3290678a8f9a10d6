"""Compilation, memory layout and mixed precision make training faster without changing its results."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

from lit_knn.callbacks import LastCheckpoint, NetworkSpeed
from lit_knn.common.errors import InputError
from lit_knn.common.rng import keyed_default_rng
from lit_knn.data import Digits
from lit_knn.estimators import KNN, OneSample
from lit_knn.modules import LitEDM, LitICT, LitMeanFlow
from lit_knn.nets import UNet
from tests.short_training import train
from tests.watched import Images, WatchedNet

MODELS = {"EDM": (LitEDM, {"lr_ramp_up_images": 0}), "iCT": (LitICT, {})}


def small_net():
    net = UNet(1, channels=8, multipliers=(1,), blocks=1)
    torch.nn.init.normal_(net.conv_out.weight, std=0.1)
    return net


def losses(name, *callbacks, lr=1e-2, **trainer_args):
    pl.seed_everything(0)
    cls, options = MODELS[name]
    model, seen = cls(small_net(), KNN(64, 16), lr=lr, **options), []
    model.log = lambda name, value, **_: seen.append(value.item()) if name == "train/loss" else None
    saves = any(isinstance(c, LastCheckpoint) for c in callbacks)
    train(
        model,
        Digits(batch_size=8),
        4,
        callbacks=list(callbacks),
        enable_checkpointing=saves,
        **trainer_args,
    )
    return model, seen


# Compiling takes long, and iCT's network runs with and without gradients, so its two graphs show it all.
def test_compiled_and_channels_last_training_is_the_same(tmp_path):
    usual, plain = losses("iCT")
    model, fast = losses(
        "iCT", NetworkSpeed(backend="aot_eager"), LastCheckpoint(dirpath=str(tmp_path))
    )
    # A compiled network rounds otherwise.
    assert fast == pytest.approx(plain, rel=1e-4)
    network = model.consistency_function.net
    assert network._compiled_call_impl is not None
    convolutions = [
        p for p in network.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1
    ]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in convolutions)
    # The checkpoint has the same names as without NetworkSpeed.
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert set(saved) == set(usual.state_dict())


def test_a_forward_derivative_is_not_compiled_in_vain():
    model = LitMeanFlow(UNet(1, channels=8, multipliers=(1,), blocks=1, augment_dim=8), OneSample())
    with pytest.raises(
        InputError, match="PyTorch does not compile forward derivatives, which LitMeanFlow takes"
    ):
        train(model, Digits(batch_size=8), 1, callbacks=[NetworkSpeed()])


def test_broken_compiler_is_said_before_the_first_step():
    words = r"NetworkSpeed: torch.compile with backend=none does not work here \(Invalid backend.*\): install what"
    model = LitEDM(small_net(), OneSample())
    with pytest.raises(InputError, match=words) as caught:
        train(model, Digits(batch_size=8), 1, callbacks=[NetworkSpeed(backend="none")])
    assert "\n" not in str(caught.value)
    assert model.images_seen == 0


class Masks(nn.Module):
    """Returns its output and its masks, two of dropout around one of whole items."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.first(x)
        one = F.dropout(torch.ones_like(x), 0.5)
        kept = (torch.rand(len(x), 1, 1, 1) > 0.3).float()
        x = self.last(one * x * kept)
        two = F.dropout(torch.ones_like(x), 0.5)
        return two * x, one, kept, two


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_compiled_masks_are_equal_with_and_without_gradients(backend, layout):
    torch.compiler.reset()
    net = Masks().to(memory_format=layout)
    net.compile(backend=backend)
    x = torch.randn(4, 4, 6, 6)

    def masks(key):
        with keyed_default_rng(x.device, key):
            return net(x)[1:]

    student, other = masks(1), masks(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        teacher = masks(1)
    for ours, theirs, others in zip(student, teacher, other, strict=True):
        assert torch.equal(ours, theirs.float())
        assert not torch.equal(ours, others)


def test_a_net_that_draws_otherwise_without_gradients_is_refused():
    class Drawing(WatchedNet):
        def forward(self, *args):
            if torch.is_grad_enabled():
                torch.rand(1)
            return super().forward(*args)

    with pytest.raises(InputError, match="draws other random numbers with gradients than without"):
        train(LitICT(Drawing(), OneSample()), Images(), 1)


@pytest.mark.parametrize(("name", "precision"), [("EDM", "16-mixed"), ("iCT", "bf16-mixed")])
def test_mixed_precision_stays_near_full_precision(name, precision):
    _, full = losses(name, lr=1e-3)
    # Lightning's 16-mixed works only on GPUs; the plug-in with a CPU's scaler runs the same code.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    model, mixed = losses(name, lr=1e-3, plugins=[MixedPrecision(precision, "cpu", scaler=scaler)])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert mixed == pytest.approx(full, rel=0.05)
    assert mixed != full


def test_a_mean_flow_trains_in_mixed_precision_on_a_cpu():
    model = LitMeanFlow(UNet(1, channels=8, multipliers=(1,), blocks=1, augment_dim=8), OneSample())
    before = [parameter.clone() for parameter in model.parameters()]
    train(model, Digits(batch_size=8), 2, plugins=[MixedPrecision("bf16-mixed", "cpu")])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
