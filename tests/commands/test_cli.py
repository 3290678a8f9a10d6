import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import callbacks
from main import main, make_cli
from tests import ROOT
from tests.image_files import image_folder

LAST = "runs/demo/knn_0/checkpoints/last.ckpt"
DEMO = str(ROOT / "configs" / "demo.yaml")
ICT_KNN = str(ROOT / "configs" / "table1" / "ict_knn.yaml")
TINY_RUN = ["-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8"]
TINY = [*TINY_RUN, "--model.estimator.k", "32", "--model.estimator.n", "8"]


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit_demo(*args, steps=4):
    every = str(max(steps // 2, 1))
    main(["fit", "-c", DEMO, *TINY, "--trainer.max_steps", str(steps), "--trainer.val_check_interval", every, *args])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a run of the demo of four steps, which is trained once."""
    folder = tmp_path_factory.mktemp("kept")
    with contextlib.chdir(folder):
        fit_demo("--trainer.log_every_n_steps", "1")
    return folder


@pytest.fixture
def trained(kept):
    """Copies that run into the current folder."""
    shutil.copytree(kept, ".", dirs_exist_ok=True)


def run_folder(version=0):
    return Path("runs/demo") / f"knn_{version}"


def test_fit_leaves_checkpoint_pictures_and_logs_and_says_where(capsys):
    fit_demo()
    printed = capsys.readouterr().out
    checkpoint = run_folder() / "checkpoints" / "last.ckpt"
    picture = run_folder() / "samples" / "step_0000004_1-step.png"
    for path in (checkpoint, picture):
        assert path.exists()
        assert str(path) in printed
    assert "tensorboard --logdir runs/demo" in printed
    assert "Fréchet distance on pixels:" in printed
    assert Image.open(picture).size[0] > 3 * 32
    assert torch.load(checkpoint, weights_only=False)["images_seen"] == 4 * 32
    assert sorted(p.name for p in Path().iterdir()) == ["runs"]


@pytest.mark.usefixtures("trained")
def test_everything_promised_is_logged():
    events = EventAccumulator(str(run_folder()))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "train/num_steps", "train/lr", "train/images_per_s", "estimator/share_of_time"} <= scalars
    assert {"val/loss", "samples/fd_pixels", "train/images_seen"} <= scalars
    groups = {name.partition("/")[0] for name in scalars}
    assert groups == {"train", "val", "estimator", "samples", "epoch"}
    assert sum(name.startswith("train/loss_t_") for name in scalars) == 4
    assert events.Tags()["images"] == ["samples/1-step", "samples/2-step"]
    share = [event.value for event in events.Scalars("estimator/share_of_time")]
    assert all(0 < value < 1 for value in share)
    assert events.Scalars("train/num_steps")[0].value == 11
    assert [event.value for event in events.Scalars("train/lr")] == pytest.approx([0.003] * 4)


@pytest.mark.usefixtures("trained")
def test_predict_writes_samples_of_the_averaged_weights(capsys):
    checkpoint = str(run_folder() / "checkpoints" / "last.ckpt")
    main(["predict", "-c", DEMO, *TINY, "--ckpt_path", checkpoint, "--data.predict_samples", "70"])
    folder = run_folder() / "predict_0" / "predictions"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [*(f"{seed:06d}.png" for seed in range(70)), "grid.png"]

    more = ["--sample_writer.format", "npz", "--sample_writer.folder", "out"]
    more += ["--data.predict_samples", "70", "--data.batch_size", "16"]
    main(["predict", "-c", DEMO, *TINY, *more, "--ckpt_path", checkpoint])
    assert sorted(path.name for path in Path("out").iterdir()) == ["grid.png", "samples.npz"]
    samples = np.load("out/samples.npz")
    assert samples["images"].shape == (70, 8, 8, 1)
    assert samples["images"].dtype == np.uint8
    assert samples["seeds"].tolist() == list(range(70))
    # Another batch size gives the same images, up to one grey level of rounding.
    single = np.asarray(Image.open(folder / "000037.png")).astype(int)
    assert np.abs(single - samples["images"][37, :, :, 0]).max() <= 1
    with pytest.raises(SystemExit):
        main(["predict", "-c", DEMO, *TINY, *more, "--ckpt_path", checkpoint])
    assert "folder=out is not empty" in capsys.readouterr().err


def scalars(version):
    events = EventAccumulator(str(run_folder(version)))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_validate_measures_what_the_end_of_training_measured():
    # N(k) has changed since the start, so the loss agrees only if `validate` knows the step.
    fit_demo("--model.total_steps", "2")
    main(["validate", "-c", DEMO, *TINY, "--model.total_steps", "2", "--ckpt_path", LAST])
    assert (run_folder(1) / "samples" / "step_0000004_1-step.png").exists()
    for name in ("val/loss", "samples/fd_pixels"):
        assert scalars(1)[name] == pytest.approx([scalars(0)[name][-1]], rel=1e-4)


@pytest.mark.usefixtures("trained")
def test_options_of_the_command_line_win_over_those_saved_in_a_checkpoint():
    for folder, steps in (("one", "1"), ("two", "2")):
        writer = ["--sample_writer.format", "npz", "--sample_writer.folder", folder]
        main(["predict", "-c", DEMO, *TINY, *writer, "--ckpt_path", LAST, "--model.predict_steps", steps])
    one, two = (np.load(f"{folder}/samples.npz")["images"].astype(int) for folder in ("one", "two"))
    assert np.abs(one - two).max() > 1
    fit_demo("--ckpt_path", LAST, "--model.total_steps", "20", steps=5)
    config = torch.load(run_folder() / "checkpoints" / "last.ckpt", weights_only=False)["hyper_parameters"]
    assert config["total_steps"] == 20


@pytest.mark.parametrize("command", ["validate", "predict"])
def test_an_untrained_model_is_not_measured(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "-c", DEMO, *TINY])
    assert "error: --ckpt_path is missing" in capsys.readouterr().err


@pytest.mark.usefixtures("trained")
def test_checkpoint_of_images_of_another_size_is_refused(capsys):
    np.save("larger.npy", np.zeros((40, 1, 16, 16), dtype=np.uint8))
    other = ["--data", "Arrays", "--data.path", "larger.npy", "--ckpt_path", LAST]
    for command in (["predict"], ["fit", "--trainer.max_steps", "6"]):
        with pytest.raises(SystemExit):
            main([*command, "-c", DEMO, *TINY, *other])
        assert "differ in shape: (1, 16, 16), (1, 8, 8)" in capsys.readouterr().err


def test_table1_run_trains_on_a_folder_of_images_with_flips_and_ivf(tmp_path):
    image_folder(tmp_path / "images", 40, (8, 8))
    args = ["--data", str(ROOT / "configs" / "data" / "image_files.yaml"), "--data.path", "images"]
    args += ["--data.hflip", "true", "--data.index", "FaissIndex", "--data.index.factory", "IVF4,SQ8"]
    args += ["--data.index.nprobe", "2"]
    args += ["--model.net", str(ROOT / "configs" / "models" / "unet.yaml"), "--model.net.channels", "8"]
    args += ["--model.estimator.k", "16", "--model.estimator.n", "8"]
    args += ["--data.batch_size", "8", "--trainer.accumulate_grad_batches", "2"]
    args += ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
    Path("often.yaml").write_text(
        "trainer:\n  callbacks:\n"
        "    - {class_path: lit_knn.callbacks.CheckpointByImages, init_args: {every_n_images: 32}}\n"
    )
    main(["fit", "-c", ICT_KNN, "-c", "often.yaml", *args, "--trainer.max_steps", "5"])
    folder = Path("runs/table1/knn_0/checkpoints")
    names = {path.name for path in folder.iterdir()}
    assert names == {"last.ckpt", "images_seen=32.ckpt", "images_seen=64.ckpt"}
    config = (folder.parent / "config.yaml").read_text()
    assert "IVF4,SQ8" in config


@pytest.mark.slow
def test_the_demo_reaches_its_figure(capsys):
    main(["fit", "-c", DEMO])
    printed = capsys.readouterr().out
    assert float(printed.rsplit("Fréchet distance on pixels:", 1)[1].split()[0]) <= 0.6


def test_training_brings_the_samples_closer_to_the_data(monkeypatch):
    values = []
    original = callbacks.PixelFrechetDistance.on_validation_epoch_end

    def remember(self, trainer, pl_module):
        original(self, trainer, pl_module)
        values.append(self.last_values["fd_pixels"])

    monkeypatch.setattr(callbacks.PixelFrechetDistance, "on_validation_epoch_end", remember)
    args = ["--model.net.channels", "16", "--model.ema_decay", "0.9"]
    fit_demo(*args, steps=80)
    assert values[-1] < 0.7 * values[0]


@pytest.mark.parametrize(("given", "batches"), [("1", 1), ("1.0", 5), ("0.4", 2), ("3", 3)])
def test_an_integer_counts_batches_and_a_fraction_is_a_share_of_them(given, batches):
    command = ["validate", "-c", str(ROOT / "configs" / "figure1" / "toy.yaml"), "--data.batch_size", "8"]
    cli = make_cli([*command, "--trainer.limit_val_batches", given, "--trainer.callbacks", "[]"])
    assert cli.trainer.num_val_batches == [batches]


def test_a_file_in_the_current_folder_comes_before_an_installed_package_of_its_name(tmp_path, monkeypatch, capsys):
    installed = tmp_path / "site" / "estimators_of_mine"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (tmp_path / "estimators_of_mine.py").write_text("from lit_knn.estimators import OneSample as Mine\n")
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", DEMO, *TINY, "--model.estimator", "estimators_of_mine.Mine", "--print_config"])
    assert stop.value.code == 0
    assert "class_path: estimators_of_mine.Mine" in capsys.readouterr().out
