"""LitFlow: times, target velocities, the loss, sampling and checkpoints."""

import pytest
import pytorch_lightning as pl
import torch
from scipy import stats

import lit_knn
from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import Exact, Network, OneSample
from lit_knn.modules import LitFlow
from lit_knn.modules.time_distributions import LogitNormalTimes, UniformTimes
from lit_knn.nets import DDPMpp, UNet
from lit_knn.nets.flow import DataOutput
from lit_knn.sampling.flow_times import FixedSteps
from lit_knn.sampling.solvers import euler_step
from lit_knn.theory.posterior import posterior_mean
from tests.short_training import TRAINER, train
from tests.toys import all_warped, rng
from tests.trained_runs import last
from tests.watched import Images, WatchedNet


def unet():
    return UNet(1, channels=4, multipliers=(1,), blocks=1)


# Times


@pytest.mark.parametrize("low", [1e-4, 0.3])
def test_times_follow_their_distribution_between_the_ends(low):
    uniform = UniformTimes(low, 0.8).draw(4000, rng())
    assert stats.kstest(uniform.numpy(), "uniform", args=(low, 0.8 - low)).pvalue > 0.01
    times = LogitNormalTimes(0.5, 1.5, low, 0.8).draw(4000, rng())
    # ln σ = logit τ is normal, as in EDM, and cut at the ends.
    a, b = ((torch.tensor(end).double().logit().item() - 0.5) / 1.5 for end in (low, 0.8))
    assert (
        stats.kstest(torch.special.logit(times).numpy(), "truncnorm", args=(a, b, 0.5, 1.5)).pvalue
        > 0.01
    )
    for drawn in (uniform, times):
        assert low - 1e-12 <= drawn.min()
        assert drawn.max() <= 0.8 + 1e-12


# Training


@pytest.mark.parametrize(
    ("estimator", "times", "warped"),
    [
        (OneSample(), UniformTimes(0.05, 0.95), False),
        (Exact(), LogitNormalTimes(-0.5, 0.8), False),
        (Exact(), UniformTimes(0.3, 0.7), True),
    ],
)
def test_flow_loss_is_squared_distance_to_velocity_of_the_set(estimator, times, warped):
    data, net, logged = Images(60), WatchedNet(), {}
    model = LitFlow(net, estimator, times=times)
    # The set is warped like the item.
    warp = all_warped(data.x).warp
    if warped:
        model.augmentation = lambda images, generator: all_warped(images)
    model.log = lambda name, value, **_: logged.update({name: value.item()})
    train(model, data, 1)
    z, noise_label, _ = net.calls[-1]
    z, tau, losses = z.double(), torch.sigmoid(4 * noise_label.double()), []
    for item in range(60):
        points = (
            warp.rows(slice(item, item + 1)).apply(data.x.unsqueeze(0))[0] if warped else data.x
        )
        s = 1 - tau[item : item + 1]
        mean = posterior_mean(z[item : item + 1] / s, points.double(), (1 - s) / s)[0]
        # z = (1 − τ)x + τε, so that ε − x = (z − x)/τ.
        mean = data.x[item] if isinstance(estimator, OneSample) else mean
        losses.append((0.3 - (z[item] - mean) / tau[item]).square().mean())
    assert logged["train/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)
    assert logged.get("train/augmented") == (1 if warped else None)


# Checkpoints


def test_checkpoint_is_estimator_and_flow_of_its_output_alone(trained_run, tmp_path):
    net = DDPMpp(
        image_size=8, in_channels=1, channels=16, multipliers=[1], blocks=1, attention_at=[]
    )
    options = {"output": DataOutput, "sampler": FixedSteps(euler_step), "sampling_steps": 7}
    model, path = (
        LitFlow(net, OneSample(), lr=1e-2, lr_ramp_up_images=0, **options),
        tmp_path / "last.ckpt",
    )
    trainer = pl.Trainer(max_steps=5, callbacks=[LastCheckpoint(dirpath=str(tmp_path))], **TRAINER)
    trainer.fit(model, Digits(batch_size=64))
    z, sigma = torch.randn(3, 1, 8, 8), torch.tensor([0.1, 1.0, 20.0])
    tau = (sigma / (1 + sigma)).double()
    column = tau[:, None, None, None]
    scaled = ((1 - column) * z).float()
    with torch.no_grad():
        velocity = model.eval().flow(scaled, tau)
    loaded = lit_knn.load(path)
    torch.testing.assert_close(loaded(scaled, tau), velocity)
    assert (loaded.num_steps, loaded.sampler.solver) == (7, euler_step)
    mean = scaled - column.float() * velocity
    torch.testing.assert_close(Network(path).posterior_mean(z, sigma), mean, rtol=1e-4, atol=1e-4)
    assert Network(path, fp16=True).posterior_mean(z, sigma).dtype == torch.float32

    validation = pl.Trainer(**{**TRAINER, "limit_val_batches": 1})
    for checkpoint, other, message in [
        (
            path,
            LitFlow(net, OneSample()),
            r"another parameterisation: {'output': 'DataOutput'}, but the model has",
        ),
        (
            last(trained_run("edm")[0]),
            LitFlow(unet(), OneSample()),
            "the checkpoint is not of LitFlow",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            validation.validate(other, Digits(batch_size=32), checkpoint, verbose=False)
