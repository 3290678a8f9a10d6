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

LAST = "runs/demo/knn_0/checkpoints/last.ckpt"
DEMO = str(ROOT / "configs" / "demo.yaml")
ICT_KNN = str(ROOT / "configs" / "table1" / "ict_knn.yaml")
TINY_RUN = ["-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8"]
# Lightning writes these lines to stderr at every start.
HARMLESS = ("Seed set to", "GPU available", "TPU available", "💡 Tip")
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


def write_images(folder, number=40, size=(8, 8), mode="RGB"):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(number):
        shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode).save(folder / f"img{i:04d}.png")
    return folder


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


def test_a_folder_with_a_space_is_quoted_in_the_command_of_tensorboard(capsys):
    fit_demo("--trainer.logger.name", "my demo", steps=1)
    assert "tensorboard --logdir 'runs/my demo'" in capsys.readouterr().out


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
    folder = run_folder(1) / "predictions"
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


@pytest.mark.usefixtures("trained")
def test_fit_resumes_from_the_command_line():
    fit_demo("--ckpt_path", str(run_folder() / "checkpoints" / "last.ckpt"), steps=6)
    checkpoint = torch.load(run_folder() / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 6
    assert checkpoint["images_seen"] == 6 * 32


def test_table1_run_trains_on_a_folder_of_images_with_flips_and_ivf(tmp_path):
    write_images(tmp_path / "images")
    args = ["--data", str(ROOT / "configs" / "data" / "image_files.yaml"), "--data.path", "images"]
    args += ["--data.hflip", "true", "--data.index.factory", "IVF4,SQ8", "--data.index.nprobe", "2"]
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


def test_latents_train_with_a_net_of_ones_own(tmp_path):
    np.save("latents.npy", np.random.default_rng(0).normal(size=(64, 2, 8, 8)).astype(np.float32) * 3)
    args = ["--data", str(ROOT / "configs" / "data" / "arrays.yaml"), "--data.path", "latents.npy"]
    args += [*TINY, "--model.net.in_channels", "2", "--trainer.max_steps", "2"]
    main(["fit", "-c", DEMO, *args])
    assert (run_folder() / "checkpoints" / "last.ckpt").exists()
    assert not list(run_folder().glob("samples/*"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model.lerning_rate", "1"], ["lerning_rate"]),
        (["--model.lr", "fast"], ["lr", "fast"]),
        (["--trainer.max_stepz", "1"], ["max_stepz"]),
        (["--model.estimator", "no_such_file.yaml"], ["estimator", "no_such_file.yaml"]),
        (["--model.estimator", "lit_knn.estimators.Nope"], ["lit_knn.estimators.Nope"]),
        (["--model.estimator.k", "1798"], ["KNN: k=1798", "1797 images"]),
        (["--model.estimator.k", "0"], ["KNN: k must be at least 1, got 0"]),
        (["--model.estimator.n", "0"], ["KNN: n must be at least 1, got 0"]),
        (["--data.batch_size", "0"], ["batch_size", "0"]),
        (["--data.batch_size", "1798"], ["batch_size=1798", "1797"]),
        (["--data.index", "FaissIndex", "--data.index.factory", "Bogus"], ["factory='Bogus'", "tested kinds"]),
        (["--data.index", "FaissIndex", "--data.index.nprobe", "2"], ["nprobe=2 needs IVF"]),
        (
            ["--data.index", "FaissIndex", "--data.index.factory", "IVF4,Flat", "--data.index.nprobe", "5"],
            ["nprobe=5 must be from 1 to the 4 lists"],
        ),
        (["--model.net.in_channels", "3"], ["in_channels=3", "(1, 8, 8)"]),
        (["--model.ema_decay", "1.5"], ["ema_decay", "1.5"]),
        (["--model.rho", "0"], ["rho", "0"]),
        (["--model.P_mean", "500"], ["P_mean=500"]),
        (["--model.sampling_sigmas", "[80, 90]"], ["sampling_sigmas=[80.0, 90.0]", "descend"]),
        (["--model.net.num_classes", "10"], ["num_classes=10"]),
        (["--model.estimator.kk", "3"], ["model.estimator", "kk"]),
        (["--modle.lr", "1"], ["--modle.lr"]),
        (["--trainer.precision", "bf17"], ["trainer.precision", "bf17"]),
        (["--trainer.devices", "0"], ["devices", "0"]),
        (["--seed_everything", "-3"], ["seed_everything", "-3"]),
        (["-c", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--data.index", "FaissIndex", "--data.index.factory", "IDMap,Flat"], ["factory='IDMap,Flat'"]),
        (["--ckpt_path", "no.ckpt"], ["ckpt_path", "no.ckpt"]),
        (["--ckpt_path", "last"], ["ckpt_path", "last"]),
        (["--ckpt_path", str(ROOT / "README.md")], ["ckpt_path", "README.md", "not a checkpoint"]),
        (["--data", "ImageFiles", "--data.path", "nowhere.zip"], ["data.path=nowhere.zip", "does not exist"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_bad_input_ends_in_one_line_before_training(args, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", DEMO, *TINY_RUN, "--trainer.max_steps", "1", *args])
    assert stop.value.code != 0
    printed = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    errors = [line for line in printed if not line.startswith(HARMLESS)]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    for word in words:
        assert word in errors[0]
    assert not list(Path().rglob("*.ckpt"))


@pytest.mark.usefixtures("trained")
def test_checkpoint_of_another_net_is_refused_in_one_line(capsys):
    args = ["--ckpt_path", str(run_folder() / "checkpoints" / "last.ckpt"), "--model.net.channels", "16"]
    with pytest.raises(SystemExit):
        fit_demo(*args)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: --ckpt_path {args[1]}: the checkpoint is of another architecture: ")
    assert error.endswith("in the model; the checkpoint is of a consistency model")


def test_ctrl_c_saves_the_last_checkpoint_and_the_run_resumes(monkeypatch):
    import lit_knn.modules.ict

    original, calls = lit_knn.modules.ict.LitICT.training_step, []

    def interrupted(self, batch, batch_idx):
        calls.append(batch_idx)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, batch, batch_idx)

    monkeypatch.setattr(lit_knn.modules.ict.LitICT, "training_step", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit_demo(steps=10)
    checkpoint = run_folder() / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 3
    fit_demo("--ckpt_path", str(checkpoint), steps=6)
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 6


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
