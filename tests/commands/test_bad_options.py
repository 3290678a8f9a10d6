"""Bad command lines: each ends in one line and exit status 2, without a traceback, and writes nothing."""

import warnings
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from lit_knn.commands.cli import command
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.cli.trainer_options import check_trainer_options
from lit_knn.common.errors import InputError
from lit_knn.common.one_line import one_line
from lit_knn.nets import UNet
from main import main
from tests import ROOT
from tests.command_lines import DEMO, TINY, refusal_of
from tests.image_files import refusal

OPTIONS = [
    ("--trainer.limit_val_batches 1.5", "invalid value 1.5 for limit_val_batches, it has to be in [0.0, 1.0] or an"),
    ("--trainer.accelerator tpu", "trainer.accelerator=tpu"),
    ("--trainer.num_nodes 2", "trainer.num_nodes=2 needs a launcher"),
    ("--trainer.precision 16-true", "trainer.precision=16-true is not one of 32-true, bf16-mixed and 16-mixed"),
    ("--trainer.precision fp16", "trainer.precision=fp16 is not one of 32-true, bf16-mixed and 16-mixed"),
    ("--trainer.max_steps -5", "`max_steps` must be a non-negative integer or -1 (infinite steps). You passed in -5."),
    ("--trainer.strategy foo", "You selected an invalid strategy name: `strategy='foo'`."),
    ("--trainer.callbacks+ LearningRateFinder", "trainer.callbacks: LearningRateFinder does not work here: compare"),
    ("--trainer.callbacks+ BatchSizeFinder", "BatchSizeFinder does not work here: give --data.batch_size"),
    ("--model.estimator.k many", "error: --model.estimator.k: Expected a whole number. Got value: many"),
    ("--model.estimator.k 1e3", "error: --model.estimator.k: Expected a whole number. Got value: 1000.0"),
    ("--trainer.max_steps 1.5", "error: --trainer.max_steps: Expected a whole number. Got value: 1.5"),
    ("--model.lr fast", "error: --model.lr: Expected a number. Got value: fast"),
    ("--optimizer Adam --optimizer.lr x", "error: --optimizer.lr: Expected a number. Got value: x"),
    ("--data.hflip maybe", "error: --data.hflip: Expected true or false. Got value: maybe"),
    ("--model.net.multipliers 1-2", "error: --model.net.multipliers: Expected a list, such as [1, 2]. Got value: 1-2"),
    ("--sample_writer.format jpg", "error: --sample_writer.format: Expected one of ['png', 'npz']. Got value: jpg"),
    ("--trainer.limit_val_batches x", "error: --trainer.limit_val_batches: Expected a whole number. Got value: x"),
    ("--data.index.r 3", "error: --data.index: Expected an instantiatable class, but lit_knn.index.Index is abstract"),
    ("--data.index FaissIndx", "FaissIndx is neither a class nor a file; did you mean FaissIndex?"),
    ("--optimizer Adamm", "error: --optimizer: Adamm is neither a class nor a file; did you mean Adam?"),
    ("--trainer.callbacks+ Fidelty", "Fidelty is neither a class nor a file; did you mean Fidelity?"),
    ("--num_images 3", "did you mean --samples or --data.predict_samples (of predict)?"),
    ("--trainer.callbacks.num_sample 3", "callbacks: Option 'num_sample' is not accepted; did you mean num_samples?"),
    ("--model lit_knn.modules.LitIct", "has no attribute 'LitIct'; did you mean lit_knn.modules.LitICT?"),
    ("--modle.lr 0.1", "did you mean --model.lr?"),
    ("--confg demo", "did you mean --config?"),
    ("--trainer.epochs 3", "did you mean --trainer.max_epochs or --trainer.min_epochs?"),
    ("--last_checkpoint.every_steps 3", "did you mean --last_checkpoint.every_n_steps?"),
    ("demo", "error: unrecognized arguments: demo; each config needs an option of its own: -c demo"),
    ("--trainer.accumulate_grad_batches 0", "trainer.accumulate_grad_batches must be at least 1, got 0"),
    ("--trainer.log_every_n_steps -1", "trainer.log_every_n_steps must be at least 1, got -1"),
    ("--trainer.val_check_interval 0", "trainer.val_check_interval must be at least 1, got 0"),
    ("--model.lr -1", "LitICT: lr must be finite and above 0, got -1.0"),
    ("--data.init_args.seed 3", "--data.seed is set by --seed_everything"),
    ("--seed_everything 1099511627776", "--seed_everything must be a number from 0 to 4294967295, got 1099511627776"),
    ("--model.net torch.nn.Identity", "the net does not accept images of shape (1, 8, 8): TypeError"),
    ("--model.estimator nobodys.Nope", "--model.estimator: No module named 'nobodys'"),
    ("--model.net lit_knn.nets.UNett", "has no attribute 'UNett'; did you mean lit_knn.nets.UNet?"),
    ("--model.net.channels 10000000", "error: not enough memory: "),
    ("--model.net.chanels 8", "--model.net: Option 'chanels' is not accepted; did you mean channels?"),
    ("--model.estimator sft.yaml", "--model.estimator sft.yaml: no such file; did you mean estimators/stf.yaml?"),
    ("--model.estimator stf", "--model.estimator: stf is neither a class nor a file; did you mean STF?"),
    ("--max_steps 10", "unrecognized arguments: --max_steps 10; did you mean --trainer.max_steps?"),
    ("--lr 0.1", "did you mean --model.lr?"),
    ("--seed 1", "did you mean --seed_everything?"),
    ("--trainer.max_step 10", "unrecognized arguments: --trainer.max_step 10; did you mean --trainer.max_steps?"),
    ("--k 5", "did you mean --model.k or --model.estimator.k?"),
    ("--model.estimator.k 1798 --trainer.logger false", "KNN: k=1798 is more than the 1797 images"),
    ("--trainer.gradient_clip_val -1", "trainer.gradient_clip_val must be at least 0, got -1"),
    ("--trainer.gradient_clip_val .nan", "trainer.gradient_clip_val must be at least 0, got nan"),
    ("--ckpt_path=", "error: --ckpt_path is empty"),
    ("--data ImageFiles --data.path [a]", "error: --data.path: Expected text. Got value: ['a']"),
    ("--model.sampling_class [a]", "error: --model.sampling_class: Expected text. Got value: ['a']"),
    ("-c nowhere.yaml", "--config nowhere.yaml: no such file"),
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_folder")


class BrokenLogger(CSVLogger):
    def __init__(
        self, save_dir: str = "runs", name: str = "mine", version: str | None = None
    ) -> None:
        raise RuntimeError("on purpose")


def test_a_logger_of_a_list_that_cannot_be_made_says_why(capsys):
    paths = "pytorch_lightning.loggers.CSVLogger", f"{__name__}.BrokenLogger"
    loggers = [{"class_path": path, "init_args": {"save_dir": "runs"}} for path in paths]
    Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    line = refusal_of(["fit", "-c", DEMO, *TINY, "-c", "loggers.yaml"], capsys)
    assert "BrokenLogger: RuntimeError: on purpose" in line
    assert len(line) < 300


def test_the_program_alone_shows_its_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: lit-knn COMMAND ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "foo",
            "there is no command 'foo'; the commands are fit, validate, predict, plan, probe, ",
        ),
        ("fti -c demo", "there is no command 'fti'; did you mean fit?"),
        ("train -c demo", "there is no command 'train'; did you mean fit?"),
        ("-c demo", "the command comes first: lit-knn COMMAND -c …; the commands are fit, "),
        (
            "--trainer.max_steps 1 fit -c demo",
            "the command comes first: lit-knn fit --trainer.max_steps …; ",
        ),
        ("fit", "the following arguments are required: fit.data, fit.model; give a config"),
        ("validate", "the following arguments are required: validate.data, validate.model; give"),
        ("fit --data Digits", "the following arguments are required: fit.model; give a config"),
        ("best", "the following arguments are required: --run, the folder of a training run"),
    ],
)
def test_a_command_line_that_lacks_something_says_what(args, message, tmp_path, capsys):
    assert refusal_of(args.split(), capsys).startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_a_bad_option_is_told_in_one_line(options, message, tmp_path, capsys):
    assert message in refusal_of(["fit", "-c", DEMO, *TINY, *options.split()], capsys)
    assert not list(tmp_path.iterdir())


FILES = [
    (b"model:\n  init_args:\n    lr: 1\n    lr: 2\n", "bad.yaml, line 4: the key lr is there twice"),
    (b"trainer:\n  callbacks:\n    - {class_path: A, class_path: B}\n", "line 3: the key class_path is there twice"),
    (b"trainer: [\n", "bad.yaml, line 2: "),
    (b"trainer:\n\tmax_steps: 1\n", "bad.yaml, line 2: a tab; YAML takes spaces alone"),
    (b"trainer: !!python/object/apply:os.system [ls]\n", "bad.yaml, line 1: could not determine a constructor"),
    (b"model:\n  init_args:\n    seed: 1\n", "bad.yaml: model.seed is set by seed_everything: give that option"),
    (b"", "bad.yaml holds no options"),
    (b"seed_everything: 1\ntrainer:\n", "trainer holds no options"),
    (b"# caf\xe9\n", "--config bad.yaml cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 5"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), FILES, ids=[message for _, message in FILES])
def test_a_bad_config_file_is_named(content, message, capsys):
    Path("bad.yaml").write_bytes(content)
    assert message in refusal_of(["fit", "-c", DEMO, *TINY, "-c", "bad.yaml"], capsys)


def test_control_characters_of_file_names_are_not_printed(capsys):
    line = refusal_of(["fit", "-c", "a\x1b[31m\nb\u202e.yaml"], capsys)
    assert line == r"error: --config a\x1b[31m\nb\u202e.yaml: no such file"


def test_a_driver_without_a_usable_gpu_is_told(tmp_path, monkeypatch):
    # This machine stands for one whose driver is too old for PyTorch.
    monkeypatch.setattr("lit_knn.commands.cli.trainer_options.NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = [*TINY, "--trainer.accelerator", "auto", "--trainer.logger", "false"]
    with pytest.warns(UserWarning, match="has an NVIDIA driver, but PyTorch .* finds no GPU"):
        make_cli(["-c", DEMO, *options], run=False)


def test_debug_shows_the_traceback_and_nothing_else_does(capsys):
    bad = ["fit", "-c", DEMO, *TINY, "--model.lr", "0"]
    assert refusal_of(bad, capsys) == "error: LitICT: lr must be finite and above 0, got 0.0"
    with pytest.raises(SystemExit) as stop:
        main([*bad, "--debug"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "error: LitICT: lr must be finite and above 0, got 0.0"
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    said = capsys.readouterr().out
    assert "--debug" in said
    assert "\nTrain a model\n" in said


def test_own_warning_is_one_line_without_source_place():
    with command.quiet():
        assert (
            warnings.formatwarning("few images", UserWarning, command.__file__, 1)
            == "warning: few images\n"
        )
        # There it lies in an archive, which has no links.
        callback = str(ROOT / "callbacks" / "fidelity.py")
        assert (
            warnings.formatwarning("few images", UserWarning, callback, 1)
            == "warning: few images\n"
        )
        assert warnings.formatwarning("few images", UserWarning, "other.py", 1).startswith(
            "other.py:1: UserWarning: "
        )
    assert warnings.formatwarning("few images", UserWarning, command.__file__, 1).startswith(
        command.__file__
    )


def failure_of(args, capsys):
    """Run a command line in which the program fails, and return the last line that it prints."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_program_fault_is_one_line_with_another_status(monkeypatch, capsys):
    monkeypatch.setattr("lit_knn.modules.ict.lognormal_step_probs", lambda *_: 1 / 0)
    line = failure_of(["fit", "-c", DEMO, *TINY], capsys)
    assert line.startswith("error: fit: ")
    assert line.endswith("division by zero (the traceback: --debug)")


def test_a_plug_in_that_fails_is_named(monkeypatch, capsys):
    monkeypatch.setattr("lit_knn.estimators.knn.KNN.draw", lambda *_: {}["missing"])
    line = failure_of(["fit", "-c", DEMO, *TINY], capsys)
    assert line == "error: fit: KNN: KeyError: 'missing' (the traceback: --debug)"


class FailingNet(UNet):
    """Fails in training only: the trial with one image finds nothing."""

    def forward(self, *args, **options):
        return [][0] if torch.is_grad_enabled() else super().forward(*args, **options)


def test_a_network_that_fails_in_a_step_is_named(capsys):
    line = failure_of(["fit", "-c", DEMO, *TINY, "--model.net", f"{__name__}.FailingNet"], capsys)
    assert (
        line
        == "error: fit: FailingNet.forward: IndexError: list index out of range (the traceback: --debug)"
    )


def test_bad_input_is_told_whatever_error_it_led_to():
    def caught(chain):
        try:
            try:
                raise InputError("the option is bad")
            except InputError as error:
                if chain:
                    raise RuntimeError("then this failed") from error
                raise KeyError("and this failed")  # noqa: B904
        except Exception as error:
            return one_line(error)

    assert caught(True) == caught(False) == ("the option is bad", 2)


def test_the_error_has_a_line_of_its_own_below_a_progress_bar(capsys):
    args = [
        "--trainer.enable_progress_bar",
        "true",
        "--trainer.max_steps",
        "9",
        "--trainer.logger",
        "false",
    ]
    with pytest.raises(SystemExit):
        main(["fit", "-c", DEMO, *TINY, *args, "--model.lr", "1e30"])
    printed = capsys.readouterr()
    assert "Training" in printed.out
    assert printed.out.endswith("\n")
    assert printed.err.strip().splitlines()[-1].startswith("error: the loss is not finite")


def test_limit_of_0_is_refused_where_nothing_would_be_done():
    limits = {
        "limit_train_batches": "fit",
        "limit_val_batches": "validate",
        "limit_predict_batches": "predict",
    }
    for limit, subcommand in (limits | dict.fromkeys(("max_steps", "max_epochs"), "fit")).items():
        assert f"{limit} must be above 0" in refusal(check_trainer_options, {limit: 0}, subcommand)
    check_trainer_options({"limit_val_batches": 0}, "fit")
