"""fit, validate and predict: what they leave, print and give to loggers, and which options and files win."""

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.plugins.hparams import plugin_data_pb2

from lit_knn.commands.average import average
from lit_knn.commands.cli.cli import CLI
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.common.tables import read_rows
from lit_knn.modules.conditioning import Conditioning
from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY, refusal_of
from tests.image_files import image_folder
from tests.trained_runs import events_of, last

pytestmark = pytest.mark.usefixtures("own_folder")
TABLE = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "runs"]


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of a run of four steps in runs/ict, and its options."""
    folder, options = trained_run("ict")
    place = ["--trainer.logger.save_dir", "runs", "--trainer.logger.name", "ict"]
    return shutil.copytree(folder, tmp_path / "runs" / "ict" / "knn_0"), [*options, *place]


def fit_demo(*args, steps=4):
    every = str(max(steps // 2, 1))
    main(
        [
            "fit",
            "-c",
            DEMO,
            *TINY,
            "--trainer.max_steps",
            str(steps),
            "--trainer.val_check_interval",
            every,
            *args,
        ]
    )


@pytest.mark.parametrize("command", ["validate", "predict", "plan", "probe", "best"])
def test_every_command_takes_the_config_of_a_run(command, run, capsys):
    config = run[0] / "config.yaml"
    assert {"ckpt_path", "weights_only"} <= yaml.safe_load(config.read_text()).keys()
    with pytest.raises(SystemExit, match="0"):
        main([command, "-c", str(config), "--print_config"])
    assert "LitICT\n" in capsys.readouterr().out


def test_fit_leaves_promised_files_and_validate_repeats_its_end(capsys):
    # N(k) changes during the run, so the losses agree only if `validate` knows the step.
    short = ["--model.total_steps", "2"]
    fit_demo(*short, "--trainer.log_every_n_steps", "1")
    printed, run = capsys.readouterr().out, Path("runs/demo/knn_0")
    for path in (last(run), run / "samples" / "step_0000004_1-step.png"):
        assert path.exists()
        assert str(path) in printed
    assert "tensorboard --logdir runs/demo" in printed
    assert "Fréchet distance on pixels:" in printed
    assert Image.open(run / "samples" / "step_0000004_1-step.png").size[0] > 3 * 32
    assert torch.load(last(run), weights_only=True)["images_seen"] == 4 * 32
    assert sorted(p.name for p in Path().iterdir()) == ["runs"]
    events, logged = events_of(run)
    assert {"train/loss", "train/num_steps", "train/images_per_s", "train/images_seen"} <= set(
        logged
    )
    assert {name.partition("/")[0] for name in logged} == {
        "train",
        "val",
        "estimator",
        "samples",
        "epoch",
    }
    assert sum(name.startswith("train/loss_t_") for name in logged) == 4
    assert events.Tags()["images"] == ["samples/1-step", "samples/2-step"]
    assert all(0 < share < 1 for share in logged["estimator/share_of_time"])
    assert logged["train/lr"] == pytest.approx([0.003] * 4)
    main(["validate", "-c", DEMO, *TINY, *short, "--ckpt_path", str(run)])
    assert Path("runs/demo/knn_1/samples/step_0000004_1-step.png").exists()
    for name in ("val/loss", "samples/fd_pixels"):
        assert events_of("runs/demo/knn_1")[1][name] == pytest.approx([logged[name][-1]], rel=1e-4)


def test_predict_writes_into_run_folder_or_where_asked(run, capsys):
    folder, options = run
    predict = ["predict", *options, "--ckpt_path", str(last(folder)), "--data.predict_samples"]
    main([*predict, "70"])
    samples = folder / "predict_0" / "predictions"
    assert sorted(path.name for path in samples.iterdir()) == [
        f"{seed:06d}.png" for seed in range(70)
    ]
    single = np.asarray(Image.open(samples / "000037.png")).astype(int)
    npz = ["--sample_writer.format", "npz", "--data.batch_size", "16", "--sample_writer.folder"]
    for place, steps in (("one", "1"), ("two", "2")):
        main([*predict, "70", *npz, place, "--model.predict_steps", steps])
    assert [path.name for path in Path("one").iterdir()] == ["samples.npz"]
    assert Path("one_grid.png").is_file()
    one, two = (np.load(f"{place}/samples.npz") for place in ("one", "two"))
    assert (one["images"].shape, one["images"].dtype) == ((70, 8, 8, 1), np.uint8)
    assert one["seeds"].tolist() == list(range(70))
    # Another batch size gives the same images, up to one grey level of rounding.
    assert np.abs(single - one["images"][37, :, :, 0]).max() <= 1
    # Options of the command line win over those saved in the checkpoint.
    assert np.abs(one["images"].astype(int) - two["images"]).max() > 1
    capsys.readouterr()
    assert "folder=one is not empty" in refusal_of([*predict, "70", *npz, "one"], capsys)
    main([*predict, "1"])
    assert (max(folder.glob("predict_*")) / "predictions" / "000000.png").is_file()
    assert [path.name for path in folder.parent.iterdir()] == ["knn_0"]


def test_resumed_fit_takes_new_options_and_refuses_other_size(run, capsys):
    folder, options = run
    more = ["--ckpt_path", str(last(folder)), "--trainer.max_steps", "6"]
    np.save("larger.npy", np.zeros((40, 1, 16, 16), dtype=np.uint8))
    for command in ("predict", "fit"):
        line = refusal_of(
            [command, *options, *more, "--data", "Arrays", "--data.path", "larger.npy"], capsys
        )
        assert "differ in shape: (1, 16, 16), (1, 8, 8)" in line
    with pytest.warns(
        UserWarning, match=r"was trained with other options: --model.total_steps 1500, now 20"
    ):
        main(["fit", *options, *more, "--model.total_steps", "20"])
    assert torch.load(last(folder), weights_only=True)["hyper_parameters"]["total_steps"] == 20


def test_an_untrained_model_is_not_measured(capsys):
    for command in ("validate", "predict"):
        assert "error: --ckpt_path is missing" in refusal_of([command, "-c", DEMO, *TINY], capsys)


def test_table1_trains_on_image_folder_with_flips_and_ivf(tmp_path):
    image_folder(tmp_path / "images", 40, (8, 8))
    args = ["--data", str(ROOT / "configs" / "data" / "image_files.yaml"), "--data.path", "images"]
    args += [
        "--data.hflip",
        "true",
        "--data.index",
        "FaissIndex",
        "--data.index.factory",
        "IVF4,SQ8",
    ]
    args += [
        "--data.index.nprobe",
        "2",
        "--data.batch_size",
        "8",
        "--trainer.accumulate_grad_batches",
        "2",
    ]
    args += [
        "--model.net",
        "models/unet.yaml",
        "--model.net.channels",
        "8",
        "--trainer.enable_progress_bar",
        "false",
    ]
    args += [
        "--model.estimator.k",
        "16",
        "--model.estimator.n",
        "8",
        "--trainer.accelerator",
        "cpu",
    ]
    args += [
        "--trainer.callbacks",
        "CheckpointByImages",
        "--trainer.callbacks.every_n_images",
        "32",
    ]
    main(
        ["fit", "-c", "table1/ict_knn", *args, "--trainer.devices", "1", "--trainer.max_steps", "5"]
    )
    folder = Path("runs/table1/knn_0")
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "images_seen=32.ckpt", "images_seen=64.ckpt"}
    assert "IVF4,SQ8" in (folder / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)  # Two cores take five minutes, one core more.
def test_the_demo_reaches_its_figure(capsys):
    main(["fit", "-c", DEMO])
    assert (
        float(capsys.readouterr().out.rsplit("Fréchet distance on pixels:", 1)[1].split()[0]) <= 0.6
    )


def test_short_run_is_validated_at_its_end():
    # Lightning counts batches there, of which a step may have several.
    fit_demo(
        "--trainer.val_check_interval", "1000", "--trainer.accumulate_grad_batches", "2", steps=3
    )
    assert [path.name[:12] for path in Path("runs/demo/knn_0/samples").glob("*_1-step.png")] == [
        "step_0000003"
    ]


def test_time_limits_are_kept_and_a_spent_one_is_refused(capsys):
    timed = ["--trainer.val_check_interval", "00:00:00:00", "--trainer.max_time", "00:00:01:00"]
    fit_demo(*timed, steps=2)
    path = Path("runs/demo/knn_0/checkpoints/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 2
    # The time of all parts counts, so this checkpoint leaves none.
    checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"] = 60.0
    torch.save(checkpoint, path)
    with pytest.raises(SystemExit):
        fit_demo(*timed, "--ckpt_path", str(path), steps=3)
    refused = "last.ckpt has used 60 of 60 s, which count from the run's first start; give more"
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(("given", "batches"), [("1", 1), ("1.0", 5), ("0.4", 2), ("3", 3)])
def test_integer_limit_counts_batches_and_fraction_is_a_share(given, batches):
    command = [
        "validate",
        "-c",
        str(ROOT / "configs" / "figure1" / "toy.yaml"),
        "--data.batch_size",
        "8",
    ]
    cli = make_cli([*command, "--trainer.limit_val_batches", given, "--trainer.callbacks", "[]"])
    assert cli.trainer.num_val_batches == [batches]


def test_one_option_sets_the_samples_of_all_callbacks(capsys):
    table = [
        "-c",
        DEMO,
        *TINY,
        "--samples",
        "33",
        "--trainer.callbacks+",
        "Memorisation",
        "--trainer.logger",
        "false",
    ]
    distance, grid, memorisation = make_cli(table, run=False).trainer.callbacks[1:4]
    assert (distance.num_samples, memorisation.num_samples, grid.num_samples) == (33, 33, 9)
    fit_demo("--samples", "40", steps=1)
    settings = Path("runs/demo/knn_0/config.yaml").read_text()
    assert "num_samples: 40" in settings
    assert "\nsamples: null\n" in settings
    assert [row["num_samples"] for row in read_rows(Path("runs/demo/knn_0/fidelity.csv"))] == ["40"]
    none, fit = ["--trainer.callbacks", "[]"], ["fit", "-c", DEMO, *TINY]
    assert "--samples 40: no callback of this run measures samples" in refusal_of(
        [*fit, "--samples", "40", *none], capsys
    )
    assert "PixelFrechetDistance: num_samples must be at least 2, got 1" in refusal_of(
        [*fit, "--samples", "1"], capsys
    )
    line = refusal_of(["predict", "-c", DEMO, *TINY, "--samples", "40"], capsys)
    assert "--samples 40 is not for predict: give --data.predict_samples 40" in line


def test_local_file_precedes_installed_package_of_its_name(tmp_path, monkeypatch, capsys):
    installed = tmp_path / "site" / "estimators_of_mine"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (tmp_path / "estimators_of_mine.py").write_text(
        "from lit_knn.estimators import OneSample as Mine\n"
    )
    monkeypatch.syspath_prepend(installed.parent)
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "fit",
                "-c",
                DEMO,
                *TINY,
                "--model.estimator",
                "estimators_of_mine.Mine",
                "--print_config",
            ]
        )
    assert stop.value.code == 0
    assert "class_path: estimators_of_mine.Mine" in capsys.readouterr().out


def test_average_has_weighted_sum_and_counts_of_last_snapshot():
    values = [
        {"weight": torch.tensor([v], dtype=torch.float16), "count": torch.tensor(int(v))}
        for v in (1.0, 3.0)
    ]
    made = average([{"averages": [value]} for value in values], np.array([0.25, 0.75]))
    assert made == {"weight": torch.tensor([2.5]), "count": torch.tensor(3)}
    assert made["weight"].dtype == torch.float32


def test_a_full_disk_names_the_folder_of_the_run(monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lit_knn.commands.cli.save_config.SaveConfigCallback.setup", full)
    line = refusal_of(["fit", "-c", DEMO, *TINY], capsys)
    assert line == "error: runs/demo/knn_0: No space left on device"


# Other models


def test_tuned_model_resumes_and_samples_without_its_start_file(trained_run, capsys):
    run, options = trained_run("ect")
    checkpoint = shutil.copy(last(run), "kept.ckpt")
    alone = [*options, *TABLE, "--model.start", "null", "--ckpt_path", str(checkpoint)]
    main(["fit", *alone, "--trainer.max_steps", "6"])
    (resumed,) = Path("runs").rglob("last.ckpt")
    assert torch.load(resumed, weights_only=True)["global_step"] == 6
    main(["validate", *alone])
    measured = [
        path for path in Path("runs").rglob("metrics.csv") if "fd_pixels" in path.read_text()
    ]
    assert len(measured) == 2
    writer = [
        "--sample_writer.folder",
        "samples",
        "--sample_writer.format",
        "npz",
        "--data.predict_samples",
        "3",
    ]
    main(["predict", *alone, *writer, "--model.predict_steps", "2"])
    assert np.load("samples/samples.npz")["images"].shape == (3, 8, 8, 1)
    capsys.readouterr()
    for start, said in (
        ("gone.ckpt", ": no such file"),
        ("null", " has no trained network: give a start"),
    ):
        assert f"error: LitECT: start={start}{said}" in refusal_of(
            ["fit", *options, "--model.start", start], capsys
        )


def test_a_flow_trains_in_bf16_measures_and_samples(trained_run):
    options = [
        *trained_run("flow")[1],
        *TABLE,
        "--model.sampling_steps",
        "3",
        "--trainer.max_steps",
        "2",
    ]
    callbacks = [
        "--trainer.callbacks+",
        "lit_knn.callbacks.Memorisation",
        "--trainer.callbacks.num_samples",
        "70",
    ]
    callbacks += [
        "--trainer.callbacks+",
        "lit_knn.callbacks.NetworkSpeed",
        "--trainer.callbacks.compile",
        "false",
    ]
    main(["fit", *options, *callbacks, "--trainer.precision", "bf16-mixed"])
    (log,) = Path("runs").rglob("metrics.csv")
    names = {name for row in read_rows(log) for name, value in row.items() if value}
    assert {
        "samples/fd_pixels",
        "samples/copied_fraction",
        "val/loss",
        "val/target_mse",
        "train/augmented",
    } <= names
    assert any(name.startswith("train/loss_t_0.25_to_0.5") for name in names)
    (path,) = Path("runs").rglob("last.ckpt")
    main(["predict", *options, "--ckpt_path", str(path), "--data.predict_samples", "3"])
    assert len(list(Path("runs").rglob("00*.png"))) == 3


# Loggers


def picture(file):
    return np.asarray(Image.open(file).convert("RGB"))


def session_of(events):
    """The options in TensorBoard's tab HPARAMS."""
    told = {}
    for tag, metadata in events.summary_metadata.items():
        if metadata.plugin_data.plugin_name == "hparams":
            told[tag] = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
    # With a description of all runs alike, the tab would not show first the options in which they differ.
    assert set(told) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    start = told["_hparams_/session_start_info"].session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}


def test_documented_loggers_together_get_pictures_and_options(monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    section = (
        (ROOT / "docs" / "command_line.md").read_text().split("## Loggers")[1].split("\n## ")[0]
    )
    (snippet,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    Path("loggers.yaml").write_text(snippet)
    more = ["--trainer.val_check_interval", "1", "--trainer.accumulate_grad_batches", "2"]
    more += ["--data.index", "FaissIndex", "--trainer.precision", "bf16-mixed"]
    table = [
        "--trainer.logger+",
        "CSVLogger",
        "--trainer.logger.save_dir",
        "runs",
        "--trainer.logger.name",
        "mine",
    ]
    main(["fit", "-c", DEMO, *TINY, *more, "-c", "loggers.yaml", *table])
    run = Path("runs/mine/knn_0")
    grid = picture(next(run.rglob("step_0000001_1-step.png")))
    for store in (Path("mlflow"), next(Path().rglob("offline-run-*"))):
        assert any(np.array_equal(grid, picture(path)) for path in store.rglob("*.png"))
    # TensorBoard compares runs by their options and by the results in these scalars.
    events, logged = events_of(run)
    told = session_of(events)
    assert {"samples/fd_pixels", "val/loss"} <= set(logged)
    assert "hp_metric" not in logged
    expected = {
        "estimator": "KNN",
        "estimator.k": 32,
        "estimator.n": 8,
        "net": "UNet",
        "net.channels": 8,
    }
    expected |= {
        "data": "Digits",
        "data.batch_size": 32,
        "data.index": "FaissIndex",
        "data.index.factory": "Flat",
    }
    expected |= {"model": "LitICT", "seed": 0, "solver": "heun_step", "lr": 3e-3}
    expected |= {"max_steps": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2}
    assert {name: told.get(name) for name in expected} == expected
    tag = next(tag for tag in events.Tags()["images"] if "grid" in tag or "sampl" in tag)
    Path("shown.png").write_bytes(events.Images(tag)[-1].encoded_image_string)
    assert np.array_equal(picture("shown.png"), grid)
    assert (run / "metrics.csv").exists()
    wandb.finish()
    (log,) = Path().rglob("run-*.wandb")
    for _ in range(100):  # W&B writes the file in a process of its own.
        if b"estimator.k" in log.read_bytes():
            break
        time.sleep(0.2)
    assert b"estimator.k" in log.read_bytes()


def test_ctrl_c_while_the_program_loads_is_one_line():
    code = """
import sys
from lit_knn.commands.entry import main
class CtrlC:
    def find_spec(self, name, *_):
        if name == "pytorch_lightning":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
main(["fit"])
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("written", ["'null'", '"None"', "'~'", "01", "'[a]'", "null"])
def test_a_class_of_a_config_file_is_the_text_in_its_quotes(written, tmp_path, monkeypatch):
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"model: {{init_args: {{sampling_class: {written}}}}}")
    parsed = make_cli(["-c", DEMO, "-c", str(mine)], run=False).config
    chosen = parsed["model"]["init_args"]["sampling_class"]

    names = ["null", "None", "~", "01", "[a]"]
    net = SimpleNamespace(num_classes=len(names), class_names=names)
    number = Conditioning(net, class_conditional=True, sampling_class=chosen).chosen_class()
    assert number == (None if written == "null" else names.index(written.strip("'\"")))


@pytest.mark.parametrize(("command", "option"), [("probe", "--levels"), ("best", "--draws")])
def test_help_names_a_commands_options_before_the_trainers(command, option, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.index("--help") < text.index(f"{option} ") < text.index("--trainer CONFIG")


def test_a_callback_with_an_enum_in_its_defaults_is_saved():
    fit_demo(
        "--trainer.callbacks+", "Timer", "--trainer.callbacks.duration", "00:01:00:00", steps=2
    )
    config = next(Path("runs").glob("*/*/config.yaml"))
    assert "interval: step" in config.read_text()
    main(["fit", "-c", str(config), "--ckpt_path", "last", "--trainer.max_steps", "4"])
