import types

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits

from lit_knn.common.errors import InputError
from lit_knn.data import CIFAR10, Arrays, Digits, ImageFiles, Prepared, ReferenceDataModule
from lit_knn.index import FaissIndex
from tests import ROOT
from tests.image_files import encoded, pixels, write_cifar10, write_folder

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(ReferenceDataModule):
    """43 vectors; vector i is the number i. They make ten batches of 4 and a rest."""

    loads = 0

    def load(self):
        self.loads += 1
        return np.arange(43, dtype=np.float32)[:, None], np.arange(43)


class Recorder(pl.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.drawn: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if len(self.drawn) == self.fail_at:
            raise RuntimeError("stopped on purpose")
        self.drawn.append(batch[0].flatten().int().tolist())
        return self.layer(batch[0] * 1e-3).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch[0].flatten().int().tolist())

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def make_trainer(folder, callbacks=(), **options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    saves = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
    return pl.Trainer(accelerator="cpu", default_root_dir=folder, **quiet, **saves, **options)


def train(folder, resume_from=None, callbacks=(), fail_at=None, **options) -> tuple[list[list[int]], pl.Trainer]:
    module = Recorder(fail_at)
    trainer = make_trainer(folder, callbacks, **options)
    trainer.fit(module, Numbers(batch_size=4, val_images=8), ckpt_path=resume_from)
    return module.drawn, trainer


@pytest.mark.parametrize(("steps", "validate"), [(7, 1.0), (9, 0), (10, 1.0), (10, 0), (13, 1.0)])
def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(tmp_path, steps, validate):
    saver = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=steps, save_top_k=1, monitor=None)
    whole, _ = train(tmp_path, max_epochs=2, limit_val_batches=validate)
    stopped, _ = train(tmp_path, callbacks=[saver], max_steps=steps, limit_val_batches=validate)
    resumed, _ = train(tmp_path, tmp_path / "at.ckpt", max_epochs=2, limit_val_batches=validate)
    assert stopped == whole[:steps]
    assert resumed == whole[steps:]
    # An epoch leaves out the rest only.
    assert [len({i for batch in epoch for i in batch}) for epoch in (whole[:10], whole[10:])] == [40, 40]
    assert len(whole) == 20
    assert whole[:10] != whole[10:]


@pytest.mark.parametrize(("limit", "steps"), [({"max_steps": 7}, 7), ({"max_steps": 10}, 10), ({"max_epochs": 1}, 10)])
def test_a_run_that_ended_goes_on_when_its_limit_is_raised(tmp_path, limit, steps):
    whole, _ = train(tmp_path, max_epochs=2)
    _, trainer = train(tmp_path, **limit)
    trainer.save_checkpoint(tmp_path / "ended.ckpt")
    raised = {"max_steps": 20} if "max_steps" in limit else {"max_epochs": 2}
    assert train(tmp_path, tmp_path / "ended.ckpt", **raised)[0] == whole[steps:]


def test_a_run_that_failed_draws_the_failed_batch_again(tmp_path):
    whole, _ = train(tmp_path, max_epochs=2)
    saver = ModelCheckpoint(tmp_path, filename="failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path, callbacks=[saver], fail_at=13, max_epochs=2)
    assert train(tmp_path, tmp_path / "failed.ckpt", max_epochs=2)[0] == whole[13:]


def test_validation_and_overfitting_repeat_their_batches_and_prediction_has_each_seed_once(tmp_path):
    drawn, _ = train(tmp_path, max_epochs=3, overfit_batches=2)
    assert drawn[:2] == drawn[2:4] == drawn[4:]
    assert drawn[0] != drawn[1]
    module, data = Recorder(), Numbers(batch_size=4, val_images=6, predict_samples=10)
    make_trainer(tmp_path, max_epochs=3, limit_train_batches=1).fit(module, data)
    assert [len(batch) for batch in module.validated] == [4, 2] * 3
    assert module.validated[:2] == module.validated[2:4] == module.validated[4:]
    # Tests have the images of validation.
    assert [x.flatten().int().tolist() for x, _ in data.test_dataloader()] == module.validated[:2]
    batches = make_trainer(tmp_path).predict(Recorder(), data)
    assert all(batch.dtype == torch.int64 for batch in batches)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_ranks_share_seeds_and_validation_images():
    ranks = [Numbers(batch_size=2, predict_samples=10, val_images=9) for _ in range(3)]
    for rank, data in enumerate(ranks):
        data.setup()
        data.trainer = types.SimpleNamespace(global_rank=rank, world_size=3)
    seeds = [torch.cat(list(data.predict_dataloader())).tolist() for data in ranks]
    assert seeds == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    validated = [int(i) for data in ranks for x, _ in data.val_dataloader() for i in x]
    assert len(validated) == len(set(validated)) == 9


def test_setup_loads_once_and_hands_on_its_options():
    index = FaissIndex("SQ8")
    data = Numbers(index=index, batch_size=4)
    data.setup("fit")
    reference = data.reference
    data.setup("validate")
    assert data.reference is reference
    assert data.loads == 1
    assert reference.index is index
    # The seed sets the order of the batches.
    first = {}
    for seed in (0, 1, 1):
        data = Numbers(batch_size=40, seed=seed)
        data.setup()
        x, _ = next(iter(data.train_dataloader()))
        assert torch.equal(first.setdefault(seed, x), x)
    assert not torch.equal(first[0], first[1])


def test_digits_span_the_pixel_range_in_17_steps():
    images, labels = Digits().load()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)
    assert set(np.diff(np.unique(images).astype(int))) == {15, 16}
    # Each value of 0 to 16 is the nearest pixel.
    assert np.abs(images[:, 0] * (16 / 255) - load_digits().images).max() < 0.5 * 16 / 255
    np.testing.assert_array_equal(labels, load_digits().target)
    data = Digits(hflip=True)
    data.setup()
    assert data.reference.N == 2 * 1797


def test_cifar10_is_read_from_its_folder(tmp_path, monkeypatch):
    data = CIFAR10(root=str(tmp_path), download=False)
    data.prepare_data()
    with pytest.raises(InputError, match=r"data\.root=.*data\.download"):
        data.setup("fit")
    expected = write_cifar10(tmp_path, monkeypatch)
    images, labels = data.load()
    np.testing.assert_array_equal(images, expected)
    assert labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]


def test_image_files_and_arrays_become_reference_sets(tmp_path):
    picture = pixels(4, 5, 3)
    write_folder(tmp_path, {"0.png": encoded(picture)})
    np.save(tmp_path / "a.npy", picture[None])
    for data in (ImageFiles(str(tmp_path)), Arrays(str(tmp_path / "a.npy"))):
        data.setup()
        np.testing.assert_array_equal(data.reference.images[0].numpy(), np.moveaxis(picture, -1, 0))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_data_configs_spell_every_argument(path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ReferenceDataModule, "data")
    given = yaml.safe_load(path.read_text())
    parsed = parser.parse_object({"data": given})
    # The files set every argument except the seed; the application sets it from --seed_everything.
    assert parsed.data.init_args.as_dict() == {"seed": 0, **given["init_args"]}
    assert "seed" not in given["init_args"]
    assert isinstance(parser.instantiate_classes(parsed).data, ReferenceDataModule)


def numbers_of(reference) -> list[int]:
    return reference.images[:, 0].int().tolist()


def test_held_out_images_are_in_neither_the_reference_set_nor_the_training_batches():
    data = Numbers(batch_size=11, held_out=10)
    data.setup("fit")
    held_out, training = numbers_of(data.held_out_reference), numbers_of(data.reference)
    assert (len(held_out), len(training)) == (10, 33)
    assert sorted(held_out + training) == list(range(43))
    assert held_out == data.held_out_reference.labels.tolist(), "labels stay with their images"
    for batches, expected in ((data.train_dataloader(), training), (data.val_dataloader(), held_out)):
        assert sorted(label for _, labels in batches for label in labels.tolist()) == sorted(expected)
    # The index and the fingerprint are those of the part.
    whole, z = Numbers(), data.held_out_reference.images
    whole.setup()
    assert whole.held_out_reference is None
    assert whole.reference.fingerprint() != data.reference.fingerprint()
    assert data.held_out_reference.search(z, 1)[0].max() == 0
    assert data.reference.search(z, 1)[0].min() >= 1


def test_train_images_are_a_draw_that_grows_and_leaves_the_held_out_images_alone():
    sets = [Numbers(held_out=10, train_images=count, seed=seed) for count, seed in ((5, 0), (20, 0), (None, 1))]
    for data in sets:
        data.setup()
    few, more, all_of_them = (set(numbers_of(data.reference)) for data in sets)
    assert (len(few), len(more), len(all_of_them)) == (5, 20, 33)
    assert few < more < all_of_them, "experiments over N add images"
    held_out = [numbers_of(data.held_out_reference) for data in sets]
    assert held_out[0] == held_out[1] == held_out[2], "networks of all seeds compare"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"held_out": 43}, "data.held_out=43 needs at least 44 images, there are 43"),
        ({"held_out": 10, "train_images": 34}, "data.held_out=10 and data.train_images=34 needs at least 44 images"),
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"batch_size": 44}, "data.batch_size=44"),
        ({"predict_samples": 0}, "data.predict_samples must be at least 1, got 0"),
        ({"val_images": 0}, "data.val_images must be at least 1, got 0"),
        ({"seed": -1}, "data.seed must be at least 0, got -1"),
        ({"held_out": -1}, "data.held_out must be at least 0, got -1"),
        ({"train_images": 0}, "data.train_images must be at least 1, got 0"),
        ({"held_out": 5, "sharded": True}, "data.held_out=5 does not work with data.sharded=true"),
    ],
)
def test_options_that_cannot_be_are_refused_before_training(options, told):
    with pytest.raises(InputError, match=told.replace(".", r"\.")):
        Numbers(**{"batch_size": 4, **options}).setup("fit")


def test_paths_that_cannot_be_are_refused(tmp_path):
    for kind in (ImageFiles, Arrays):
        with pytest.raises(InputError, match="absent does not exist"):
            kind(path=str(tmp_path / "absent")).setup("fit")
    with pytest.raises(InputError, match=r"data\.train_images=5 does not work with Prepared, which maps its file"):
        Prepared("absent.npy", train_images=5).setup()
