"""Bad command lines: each ends in one line and exit status 2, without a traceback, and writes nothing."""

from pathlib import Path

import pytest
import torch
from torch import nn

from main import main, make_cli
from tests import ROOT
from tests.command_lines import DEMO, TINY, refusal_of

CONFIGS = ROOT / "configs"
OPTIONS = [
    ("--trainer.accumulate_grad_batches 0", "trainer.accumulate_grad_batches must be at least 1, got 0"),
    ("--trainer.accumulate_grad_batches -1", "trainer.accumulate_grad_batches must be at least 1, got -1"),
    ("--trainer.log_every_n_steps 0", "trainer.log_every_n_steps must be at least 1, got 0"),
    ("--trainer.max_steps 0", "trainer.max_steps must be at least 1, or -1 for no limit, got 0"),
    ("--trainer.max_epochs -2", "trainer.max_epochs must be at least 1, or -1 for no limit, got -2"),
    ("--trainer.check_val_every_n_epoch 0", "trainer.check_val_every_n_epoch must be at least 1, got 0"),
    ("--trainer.num_nodes 0", "trainer.num_nodes must be at least 1, got 0"),
    ("--trainer.val_check_interval 0", "trainer.val_check_interval must be a number of batches of at least 1"),
    ("--trainer.limit_train_batches 0", "trainer.limit_train_batches must be a number of batches of at least 1"),
    ("--trainer.limit_val_batches -1", "1.0, or 0 for none, got -1"),
    ("--trainer.limit_val_batches 1.5", "share of an epoch above 0.0 and up to 1.0, or 0 for none, got 1.5"),
    ("--trainer.gradient_clip_val -1", "trainer.gradient_clip_val must be at least 0, got -1"),
    ("--trainer.gradient_clip_val .nan", "trainer: gradient_clip_val: nan is not a finite number"),
    ("--trainer.devices 99999", "trainer.devices=99999 must be at most"),
    ("--trainer.devices -1", "trainer.accelerator=cpu, trainer.devices=-1"),
    ("--trainer.devices abc", "trainer.devices=abc"),
    ("--trainer.devices [0,1]", "trainer.devices=[0, 1]"),
    ("--trainer.accelerator tpu", "trainer.accelerator=tpu"),
    ("--trainer.num_nodes 2", "trainer.num_nodes=2 needs a launcher"),
    ("--trainer.precision 16-true", "trainer.precision=16-true is not one of 32-true, bf16-mixed and 16-mixed"),
    ("--trainer.precision 64-true", "trainer.precision=64-true is not one of"),
    ("--trainer.precision transformer-engine", "trainer.precision=transformer-engine is not one of"),
    ("--trainer.log_every_n_steps text", "--trainer.log_every_n_steps"),
    ("--model.lr null", "LitICT: lr: null is not allowed"),
    ("--model.net.channels null", "UNet: channels: null is not allowed"),
    ("--data.batch_size null", "Digits: batch_size: null is not allowed"),
    ("--model.P_mean .inf", "LitICT: P_mean: inf is not a finite number"),
    ("--model.sampling_sigmas [.nan]", "LitICT: sampling_sigmas: nan is not a finite number"),
    ("--model.total_steps 100000000000000000000", "LitICT: total_steps: 100000000000000000000 is beyond 64 bits"),
    ("--model.lr -1", "LitICT: lr must be above 0, got -1.0"),
    ("--model.lr -1e-3", "LitICT: lr must be above 0, got -0.001"),
    ("--model.rho 1e-5", "LitICT: 21 levels between 0.002 and 80.0 are not distinct with rho=1e-05"),
    ("--model.rho 1e30", "are not distinct with rho=1e+30"),
    ("--model.s1 100000000", "LitICT: num_steps must be an integer from 2 to 16777216"),
    ("--model.seed 3", "--model.seed is set by --seed_everything"),
    ("--seed_everything 1099511627776", "--seed_everything must be a number from 0 to 4294967295, got 1099511627776"),
    ("--model.net.num_classes -4", "UNet: num_classes must be at least 0, got -4"),
    ("--model.net.augment_dim -1", "UNet: augment_dim must be at least 0, got -1"),
    ("--model.net.blocks 1000000000", "UNet: blocks must be at most 100, got 1000000000"),
    ("--model.net.channels 1000000", "UNet: the weights take"),
    ("--model.net DDPMpp --model.net.image_size 8 --model.net.blocks 1000000000", "DDPMpp: blocks must be at most 100"),
    ("--model.net torch.nn.Linear", "--model.net: the following arguments are required: in_features, out_features"),
    ("--model.net torch.nn.Identity", "LitICT: net=Identity does not take the arguments z_scaled"),
    ("--model.net torch.nn.Module", "LitICT: net=Module has no parameters to train"),
    ("--model.solver os.system", "LitICT: solver=system does not take the arguments z, t, t_next, posterior_mean"),
    ("--model.solver builtins.print", "LitICT: solver=print must return latents of the shape of z"),
    ("--model.estimator mine.Nope", "--model.estimator: No module named 'mine'"),
    ("--model.estimator.k true", "--model.estimator.k: Expected a <class 'int'>"),
    ("--model.net.chanels 8", "--model.net: Option 'chanels' is not accepted; did you mean channels?"),
    ("--model.estimator.zzz 8", "--model.estimator: Option 'zzz' is not accepted; it has include_source, k, n"),
    (
        "--trainer.callbacks.num_sample 8",
        "SampleGrid: Option 'num_sample' is not accepted; did you mean num_samples?",
    ),
    ("--model.estimator sft.yaml", "--model.estimator sft.yaml: no such file; did you mean estimators/stf.yaml?"),
    ("--model.estimator stf", "--model.estimator: Expected a dot import path string: stf"),
    ("-c nowhere.yaml", "--config nowhere.yaml: no such file"),
    ("-c .", "--config .: this is a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_a_bad_option_is_told_in_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in refusal_of(["fit", "-c", DEMO, *TINY, *options.split()], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --image_shape []", "plan: image_shape=[] is empty"),
        ("plan --images 0", "plan: images must be above 0, got 0"),
        ("plan --trainer.devices 1000000000", "trainer.devices=1000000000 must be at most 1024"),
    ],
)
def test_a_bad_option_of_plan_is_told_in_one_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    assert message in refusal_of([name, "-c", DEMO, *TINY, *options], capsys)


FILES = [
    (b"model:\n  init_args:\n    lr: 1\n    lr: 2\n", "bad.yaml, line 4: the key lr is there twice"),
    (b"trainer: {callbacks: [{class_path: lit_knn.callbacks.LastCheckpoint}]}\n",
     "trainer.callbacks: each run has a LastCheckpoint already; its options are --last_checkpoint."),
    (b"trainer: {callbacks: [{class_path: lit_knn.callbacks.SampleGrid, init_args: {num_sampls: 3}}, "
     b"{class_path: lit_knn.callbacks.CheckpointByImages}]}\n",
     "--trainer.callbacks: SampleGrid: Option 'num_sampls' is not accepted; did you mean num_samples? (given: ["),
    (b"trainer: [\n", "bad.yaml, line 2: "),
    (b"trainer: !!python/object/apply:os.system [ls]\n", "bad.yaml, line 1: could not determine a constructor"),
    (b"trainer: null\n", "--trainer: null is not allowed"),
    (b"- 1\n", "bad.yaml holds no options"),
    (b"", "bad.yaml holds no options"),
    (b"model: {init_args: {estimator: inner.yaml}}\n", "sub-config file inner.yaml: the key class_path is there twice"),
    (b"model: {init_args: {estimator: bad.yaml}}\n", "Config file loop detected: bad.yaml -> bad.yaml"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), FILES, ids=[message for _, message in FILES])
def test_a_bad_config_file_is_named(content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_bytes(content)
    Path("inner.yaml").write_text("class_path: lit_knn.estimators.KNN\nclass_path: lit_knn.estimators.STF\n")
    assert message in refusal_of(["fit", "-c", DEMO, *TINY, "-c", "bad.yaml"], capsys)


def test_a_file_behind_any_option_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("inner.yaml").write_text("class_path: [\n")
    for options in (["--model.estimator", "inner.yaml"], ["--model.estimator=inner.yaml"]):
        line = refusal_of(["fit", "-c", DEMO, *TINY, *options], capsys)
        assert line.startswith("error: --model.estimator: Invalid content in sub-config file inner.yaml")


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = refusal_of(["fit", "-c", "a\x1b[31m\nb\u202e.yaml"], capsys)
    assert line == r"error: --config a\x1b[31m\nb\u202e.yaml: no such file"


def test_an_empty_mapping_that_is_an_option_is_allowed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("trainer: {}\nmodel: {init_args: {estimator: {init_args: {}}}}\n")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", DEMO, *TINY, "-c", "empty.yaml", "--print_config"])
    assert stop.value.code == 0
    assert "class_path: lit_knn.estimators.KNN" in capsys.readouterr().out


def test_more_draws_than_images_are_refused_before_they_take_the_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--model.estimator.n", "1000000", "--trainer.logger", "false"]
    assert "KNN: n=1000000 is more than the 1797 images" in refusal_of(["fit", "-c", DEMO, *TINY, *args], capsys)


class TwoOutputs(nn.Module):
    """A network that is called as ours are, and returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, z_scaled, noise_label, class_label=None):
        return z_scaled * self.weight, noise_label


@pytest.mark.filterwarnings("ignore")
def test_a_net_that_returns_no_images_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--model.net", "tests.commands.test_bad_options.TwoOutputs", "--trainer.logger", "false"]
    line = refusal_of(["fit", "-c", DEMO, *TINY[:2], *TINY[4:], *args], capsys)
    assert "the net does not accept images of shape (1, 8, 8)" in line


def test_debug_shows_the_traceback_and_nothing_else_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bad = ["fit", "-c", DEMO, *TINY, "--model.lr", "0"]
    assert refusal_of(bad, capsys) == "error: LitICT: lr must be above 0, got 0.0"
    with pytest.raises(SystemExit) as stop:
        main([*bad, "--debug"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "error: LitICT: lr must be above 0, got 0.0"
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "--debug" in capsys.readouterr().out


def test_a_fault_of_the_program_is_told_in_one_line_with_another_status(tmp_path, monkeypatch, capsys):
    import lit_knn.modules.ict

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lit_knn.modules.ict, "lognormal_step_probs", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", DEMO, *TINY])
    assert stop.value.code == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: fit: ")
    assert line.endswith("division by zero (the traceback: --debug)")


def test_the_error_has_a_line_of_its_own_below_a_progress_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--trainer.enable_progress_bar", "true", "--trainer.max_steps", "9", "--trainer.logger", "false"]
    with pytest.raises(SystemExit):
        main(["fit", "-c", DEMO, *TINY, *args, "--model.lr", "1e30"])
    printed = capsys.readouterr()
    assert "Training" in printed.out
    assert printed.out.endswith("\n")
    assert printed.err.strip().splitlines()[-1].startswith("error: the loss is not finite")


def test_predict_writes_samples_without_being_asked_for_a_writer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "demo.yaml")
    Path("none.yaml").write_text("trainer:\n  callbacks: null\n")
    model = ["--model", "LitEstimator", "--model.estimator", str(CONFIGS / "estimators" / "exact.yaml")]
    data = ["--data", "Digits", "--data.predict_samples", "2", "--data.batch_size", "2"]
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    assert config == DEMO
    cli = make_cli(["predict", *model, "--model.sampling_steps", "8", *data, *quiet])
    assert not cli.trainer.predict_loop.return_predictions  # They would fill the memory.
    folder = Path("runs/lightning_logs/exact_0/predictions")
    assert sorted(path.name for path in folder.iterdir()) == ["000000.png", "000001.png", "grid.png"]
