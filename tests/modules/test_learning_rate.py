"""Learning rate and averaged weights: each follows the images or steps of its option, and schedules act alone."""

from itertools import pairwise

import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import CheckpointByImages, LastCheckpoint
from lit_knn.estimators import OneSample
from lit_knn.modules import LitEDM, LitICT
from main import main
from tests.command_lines import DEMO, ROOT, TINY, refusal_of
from tests.short_training import TRAINER, train
from tests.watched import Images, WatchedNet

EDM = str(ROOT / "configs" / "table2" / "digits.yaml")
WARMUP = [
    "-c",
    str(ROOT / "configs" / "schedules" / "warmup_cosine.yaml"),
    "--lr_scheduler.max_lr",
    "0.002",
]
WARMUP += ["--lr_scheduler.total_steps", "5"]
ADAM = ["--optimizer", "Adam"]
COSINE = ["--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "4"]


class History(pl.Callback):
    """Weight, images seen and learning rate after each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        if len(self.steps) < trainer.global_step:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.steps.append((pl_module.network.value.item(), pl_module.images_seen, rate))


# With batches of 20, the second step of an epoch has only one batch.
@pytest.mark.parametrize(
    ("kind", "batch_size", "counts"),
    [
        (LitEDM, 30, [60, 120, 180, 240]),
        (LitEDM, 20, [40, 60, 100, 120]),
        (LitICT, 30, [60, 120, 180, 240]),
    ],
)
def test_learning_rate_and_average_follow_accumulated_images(kind, batch_size, counts, tmp_path):
    by_images = kind is LitEDM
    options = (
        {"lr_ramp_up_images": 170, "ema_half_life_images": 15} if by_images else {"ema_decay": 0.8}
    )
    history = History()
    callbacks = [
        history,
        LastCheckpoint(dirpath=str(tmp_path)),
        CheckpointByImages(1, str(tmp_path)),
    ]
    trainer = pl.Trainer(max_steps=8, accumulate_grad_batches=2, callbacks=callbacks, **TRAINER)
    model = kind(WatchedNet(), OneSample(), lr=0.1, **options)
    trainer.fit(model, Images(batch_size))
    values, images, rates = zip(*history.steps, strict=True)
    assert len({0.3, *values}) == 9
    assert list(images[:4]) == counts
    # The rate counts the images of its own step, too, so it is never zero.
    assert rates == pytest.approx(
        [0.1 * min(1, seen / 170) if by_images else 0.1 for seen in images]
    )
    average = values[0]
    for (before, seen), value in zip(pairwise(images), values[1:], strict=True):
        decay = 0.5 ** ((seen - before) / min(15, 0.05 * seen)) if by_images else 0.8
        average = decay * average + (1 - decay) * value
    (saved,) = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"].values()
    assert saved.item() == pytest.approx(average, rel=1e-5)
    # The same trainer evaluates the averaged weights of the checkpoint.
    trainer.validate(model, Images(batch_size), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert (model.network.value.item(), model.step) == (saved.item(), 8)
    trainer.validate(
        model,
        Images(batch_size),
        ckpt_path=tmp_path / f"images_seen={counts[1]}.ckpt",
        verbose=False,
    )
    assert (model.images_seen, model.step) == (counts[1], 2)  # Not the step of the fit before.


def test_warm_up_and_cosine_config_ends_at_0_after_its_steps(tmp_path):
    logger = ["--trainer.logger.save_dir", str(tmp_path), "--trainer.logger.name", "run"]
    rates = ["--optimizer.lr", "0.002", "--model.lr", "0.002"]
    main(["fit", "-c", DEMO, *TINY, *logger, "--trainer.max_steps", "4", *WARMUP, *rates])
    checkpoint = torch.load(
        tmp_path / "run" / "knn_0" / "checkpoints" / "last.ckpt", weights_only=True
    )
    assert checkpoint["global_step"] == 4
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-7)


def test_a_schedule_sets_the_rate_of_every_step_alone():
    seen = []

    class Scheduled(LitEDM):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda own, *_: seen.append(own.param_groups[0]["lr"]))
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    train(Scheduled(WatchedNet(), OneSample(), lr=0.002, lr_ramp_up_images=1000), Images(), 3)
    assert seen == pytest.approx([0.002, 0.0015, 0.001])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (ADAM, "--optimizer.lr=0.001 and --model.lr=0.002 are two learning rates"),
        (
            [*WARMUP, "--optimizer.lr", "0.003", "--model.lr", "0.003"],
            "--lr_scheduler.max_lr=0.002 and --model.lr=0.003 are",
        ),
        (COSINE, "--lr_scheduler has no effect without --optimizer"),
        (
            [*ADAM, "--optimizer.lr", "0.002", *COSINE],
            "--model.lr_ramp_up_images=10000 has no effect beside --lr",
        ),
    ],
)
def test_contradictions_are_refused(args, told, own_folder, capsys):
    assert told in refusal_of(["fit", "-c", EDM, *TINY, *args], capsys)
