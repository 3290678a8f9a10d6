"""What training modules share: bad losses, averages, logs, images seen, and the options of sampling and validation."""

import math

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint
from lit_knn.common.errors import NonFiniteLossError
from lit_knn.estimators import Exact, OneSample
from lit_knn.modules import LitEDM, LitEstimator, LitICT
from tests.short_training import TRAINER, train
from tests.watched import Asked, Images, OneOfSeveral, WatchedNet, heun_levels, karras, undone

BOTH = pytest.mark.parametrize("kind", [LitICT, LitEDM])


class OneBadItem(WatchedNet):
    """Its output for item 7 is not finite from the second call on."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        bad = torch.zeros_like(output)
        if len(self.calls) > 1:
            bad[7] = math.inf
        return output + bad


def test_one_item_with_an_infinite_loss_stops_the_run_and_its_level_is_named():
    net = OneBadItem()
    with pytest.raises(NonFiniteLossError) as stop:
        train(LitEDM(net, OneSample()), Images(), 1)
    t = undone(net.calls[-1])[1].flatten()[7].item()
    assert f"t={t:.4g};" in str(stop.value)


@BOTH
@pytest.mark.parametrize(("rank", "size", "accumulated"), [(0, 1, 1), (0, 3, 1), (2, 3, 2)])
def test_images_seen_count_all_ranks_and_all_batches(kind, rank, size, accumulated):
    model = kind(WatchedNet(), OneSample())
    train(model, Images(), 2, strategy=OneOfSeveral(rank, size), accumulate_grad_batches=accumulated)
    assert model.images_seen == 2 * 30 * size * accumulated


def test_an_average_goes_on_after_a_resume_as_without_it(tmp_path):
    def run(steps, ckpt_path=None, half_life=100):
        model = LitEDM(WatchedNet(), OneSample(), lr=0.1, lr_ramp_up_images=0, ema_half_life_images=half_life)
        folder = tmp_path / f"{steps} {ckpt_path is None}"
        trainer = pl.Trainer(max_steps=steps, **TRAINER, callbacks=[LastCheckpoint(dirpath=str(folder))])
        trainer.fit(model, Images(batch_size=60), ckpt_path=ckpt_path)
        return torch.load(folder / "last.ckpt", weights_only=False)

    run(3)
    resumed, whole = run(6, tmp_path / "3 True" / "last.ckpt"), run(6)
    name = "denoiser.model.value"
    assert resumed["state_dict"][name].item() == whole["state_dict"][name].item()
    assert resumed["state_dict"][name].item() != whole["current_model_state"][name].item()


def test_averages_are_logged_every_n_steps():
    logged = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.log_dict = lambda values, **_: logged.setdefault(trainer.global_step, values)

    net = WatchedNet()
    grid = {"sigma_min": 0.01, "sigma_max": 50.0}
    model = LitEDM(net, OneSample(), P_mean=0.0, P_std=3.0, lr=0.5, lr_ramp_up_images=0, **grid)
    losses, original = [], model.losses
    model.losses = lambda *args: losses.append(original(*args)) or losses[-1]
    train(model, Images(), 6, callbacks=[Watch()], log_every_n_steps=3, accumulate_grad_batches=2)
    assert list(logged) == [3, 6]
    assert logged[6]["train/lr"] == 0.5
    # The bands divide ln t into four equal parts between 0.01 and 50.
    edges = [0.01 * 5000 ** (i / 4) for i in range(5)]
    loss, t = (torch.cat([pair[i].detach().flatten() for pair in losses[6:]]) for i in (0, 1))
    for low, high in zip([0, *edges[1:4]], [*edges[1:4], math.inf], strict=True):
        band = (t > low) & (t <= high)
        shown = [max(low, 0.01), min(high, 50.0)]
        name = f"train/loss_t_{shown[0]:.3g}_to_{shown[1]:.3g}"
        assert logged[6][name] == pytest.approx(loss[band].mean().item(), rel=1e-4)


def test_the_error_of_the_target_is_measured_only_where_asked():
    def metrics(**options):
        trainer = pl.Trainer(**{**TRAINER, "limit_val_batches": 1, "enable_checkpointing": False})
        return trainer.validate(LitEDM(WatchedNet(), Exact(), **options), Images(), verbose=False)[0]

    assert "val/target_mse" in metrics()
    assert "val/target_mse" not in metrics(measure_target=False)


def test_the_loss_has_the_preconditioning_and_the_weight_of_sigma_data():
    net, losses = WatchedNet(), []
    model = LitEDM(net, OneSample(), sigma_data=0.2)
    original = model.losses
    model.losses = lambda *args: losses.append(original(*args)) or losses[-1]
    data = Images(batch_size=60)
    train(model, data, 1)
    z, t = undone(net.calls[-1], sigma_data=0.2)
    norm = (t**2 + 0.04).sqrt()
    denoised = 0.04 / norm**2 * z + 0.2 * t / norm * 0.3
    expected = (norm / (0.2 * t)) ** 2 * (denoised - data.x) ** 2
    torch.testing.assert_close(losses[0][0].double(), expected.flatten(1).mean(1), rtol=1e-3, atol=1e-5)


GRID = {"sigma_min": 0.03, "sigma_max": 12.0, "rho": 4.0}


@pytest.mark.parametrize("steps", [None, 3])
def test_samples_of_edm_go_through_the_grid_of_the_options(steps):
    net = WatchedNet()
    model = LitEDM(net, OneSample(), sampling_steps=5, **GRID)
    model.image_shape = (1, 4, 4)
    model.sample([1, 2], steps)
    levels = [undone(call)[1][0].item() for call in net.calls]
    assert levels == pytest.approx(heun_levels(karras(steps or 5, **GRID)), rel=1e-5)
    assert undone(net.calls[0])[0].std().item() == pytest.approx(12, rel=0.5)


def samples_of(seeds, steps=None, **options):
    estimator = Asked(num_classes=3)
    model = LitEstimator(estimator, sampling_steps=5, **GRID, **options)
    trainer = pl.Trainer(**TRAINER)
    data = Images()
    data.predict_dataloader = lambda: torch.utils.data.DataLoader(list(seeds), batch_size=3)
    trainer.predict(model, data)
    return estimator


def test_samples_of_an_estimator_have_the_grid_the_class_and_draws_of_their_own():
    estimator = samples_of(range(6), sampling_class=0)
    assert estimator.levels == pytest.approx(2 * heun_levels(karras(5, **GRID)), rel=1e-6)
    assert estimator.labels == [[0, 0, 0]] * len(estimator.levels)
    first, second = estimator.drawn[0], estimator.drawn[len(estimator.drawn) // 2]
    assert not torch.equal(first, second)
    assert not torch.equal(first, samples_of(range(3), seed=1).drawn[0])
    assert torch.equal(first, samples_of(range(3)).drawn[0])
