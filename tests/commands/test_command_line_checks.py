"""The checks of a command line one by one: what they refuse, what they let pass, and what they say."""

import os

from lit_knn.commands.cli.trainer_options import check_trainer_options, validated_at_the_end
from lit_knn.common.errors import InputError, one_line
from tests.image_files import refusal


def test_a_limit_of_0_is_refused_where_the_command_would_do_nothing():
    for command, limit in (("fit", "train"), ("validate", "val"), ("predict", "predict")):
        options = {f"limit_{limit}_batches": 0}
        assert f"limit_{limit}_batches must be above 0" in refusal(check_trainer_options, options, command)
    check_trainer_options({"limit_val_batches": 0}, "fit")


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


def test_a_short_run_is_validated_after_its_last_step():
    options = {"max_steps": 3, "val_check_interval": 1000, "check_val_every_n_epoch": None}
    # Lightning counts batches there, of which a step may have several.
    assert validated_at_the_end({**options, "accumulate_grad_batches": 4}) == {"val_check_interval": 12}
    assert validated_at_the_end({**options, "accumulate_grad_batches": None}) == {"val_check_interval": 3}
    assert validated_at_the_end({**options, "accumulate_grad_batches": 400}) == {}
