"""The checks of a command line one by one: what they refuse, what they let pass, and what they say."""

import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_knn.commands.cli.arguments import check_linked, with_joined_negatives
from lit_knn.commands.cli.cli import CLI, make_cli
from lit_knn.commands.cli.construction import check_arguments
from lit_knn.commands.cli.interruption import interrupted
from lit_knn.commands.cli.trainer_options import check_processes, check_trainer_options
from lit_knn.common.errors import InputError, one_line
from lit_knn.runs.interruption import RunInterrupted
from tests.image_files import refusal


@pytest.mark.parametrize("number", ["-1", "-1e-3", "-.5", "-inf"])
def test_negative_numbers_belong_to_the_option_before_them(number):
    assert with_joined_negatives(["fit", "--model.lr", number, "--x"]) == ["fit", f"--model.lr={number}", "--x"]
    assert with_joined_negatives(["fit", "--model.lr=1", number]) == ["fit", "--model.lr=1", number]


@pytest.mark.parametrize(
    ("args", "number"),
    [(["fit", "--model.lr", "x"], 1), *((args, len(CLI.subcommands())) for args in (["--nope", "fit"], ["nope"], []))],
)
def test_only_the_options_of_the_called_command_are_added(args, number, monkeypatch):
    added = []
    original = CLI.add_arguments_to_parser
    monkeypatch.setattr(CLI, "add_arguments_to_parser", lambda *a: added.append(1) or original(*a))
    with pytest.raises((Exception, SystemExit)):
        make_cli(args)
    assert len(added) == number


def test_a_limit_of_0_is_refused_where_the_command_would_do_nothing():
    for command in ("fit", "validate", "predict"):
        name = {"fit": "train", "validate": "val"}.get(command, command)
        for limit in ("train", "val", "predict"):
            options = {f"limit_{limit}_batches": 0}
            if limit == name:
                assert f"limit_{limit}_batches must be" in refusal(check_trainer_options, options, command)
            else:
                check_trainer_options(options, command)


@pytest.mark.parametrize(("devices", "nodes", "fits"), [(2, 2, True), (4, 1, False), (1, 4, False), (2, 1, False)])
def test_the_processes_of_torchrun_are_those_of_the_options(devices, nodes, fits, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    trainer = SimpleNamespace(num_devices=devices, num_nodes=nodes)
    if fits:
        check_processes(trainer)
    else:
        assert "torchrun has started 4 processes" in refusal(check_processes, trainer)


def test_the_command_that_goes_on_is_the_same_but_for_the_checkpoint(capsys):
    args = ["fit", "-c", "my config.yaml", "--ckpt_path", "old.ckpt", "--trainer.max_steps", "9"]
    stop = RunInterrupted(signal.SIGTERM, 3, str(Path("a run") / "last.ckpt"))
    assert interrupted(stop, args).code == 143
    said = capsys.readouterr().err
    assert "interrupted by SIGTERM after step 3" in said
    expected = ["fit", "-c", "my config.yaml", "--trainer.max_steps", "9", "--ckpt_path", "a run/last.ckpt"]
    assert shlex.split(said.partition("to go on: ")[2]) == ["lit-knn", *expected]


@pytest.mark.parametrize("option", ["--model.seed", "--data.seed", "--data.init_args.seed", "--model.seed=3"])
def test_the_seed_of_a_part_is_refused(option):
    assert "is set by --seed_everything" in refusal(check_linked, ["fit", option, "3"])


@pytest.mark.parametrize("value", [2**63, -(2**63), -(2**70), float("-inf")])
def test_numbers_that_no_tensor_holds_are_refused(value):
    assert refusal(check_arguments, "LitX", object, {"x": [1, value]}).startswith("LitX: x: ")
    check_arguments("LitX", object, {"x": [1 - 2**63, 2**63 - 1]})


def test_only_a_plan_for_another_machine_takes_more_devices_than_this_one_has(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_trainer_options({"devices": "64"}, "fit", elsewhere=True)
    assert "devices=64 must be at most" in refusal(check_trainer_options, {"devices": "64"}, "fit")


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
