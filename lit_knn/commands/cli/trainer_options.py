"""Checks options of the trainer and learning rates that Lightning would refuse late or never."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lit_knn.common.errors import InputError, joined_lines
from lit_knn.runs.names import Options, option_of, options_in

# Lightning accepts 0 and less for these counts. The training then fails, or counts wrongly.
COUNTS = ("accumulate_grad_batches", "log_every_n_steps", "val_check_interval")
# If one of these options is 0, the command beside it would do nothing.
WORK = dict.fromkeys(("limit_train_batches", "max_steps", "max_epochs"), "fit")
WORK |= {"limit_val_batches": "validate", "limit_predict_batches": "predict"}
PRECISIONS = ("32-true", "32", "16-mixed", "16", "bf16-mixed", "bf16")
# The errors by which Lightning's trainer refuses its options.
REFUSALS = (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def check(options: Options, command: str | None) -> None:
    """Raise InputError for the first option of a command that Lightning would refuse late or never.

    Args:
        options: the options of the command, as plain dictionaries.
        command: name of the command; None if only the objects are made, for a training.
    """
    trains = command in (None, "plan")
    check_trainer_options(options["trainer"], "fit" if trains else str(command))
    check_learning_rate(options)


def check_trainer_options(options: Options, command: str) -> None:
    """Raise InputError for the first option of the trainer that is out of its range."""
    for name, its_command in WORK.items():
        if command == its_command and options.get(name) == 0:
            raise InputError(f"trainer.{name} must be above 0: {command} would do nothing")

    for name in COUNTS:
        count = options.get(name)
        if type(count) is int and count < 1:
            raise InputError(f"trainer.{name} must be at least 1, got {count}")

    clip = options.get("gradient_clip_val")
    # Below 0 Lightning would not clip at all, and with NaN it would fail later. `not clip >= 0` is true of both.
    if clip is not None and not clip >= 0:
        raise InputError(f"trainer.gradient_clip_val must be at least 0, got {clip}")

    precision = options.get("precision")
    if precision is not None and str(precision) not in PRECISIONS:
        raise InputError(
            f"trainer.precision={precision} is not one of 32-true, bf16-mixed and 16-mixed"
        )


def warn_of_unused_gpu(options: Namespace) -> None:
    """Warn if a run that may use any device is on the CPU although the machine has an NVIDIA driver."""
    if (
        options.accelerator in (None, "auto")
        and NVIDIA_DRIVER.exists()
        and not torch.cuda.is_available()
    ):
        problem = f"this machine has an NVIDIA driver, but PyTorch {torch.__version__} finds no GPU"
        advice = "the driver may be too old, see docs/troubleshooting.md"
        rank_zero_warn(f"{problem}, so the run is on the CPU; {advice}")


def check_learning_rate(options: Options) -> None:
    """Raise InputError for two learning rates, a schedule without an optimiser, or a ramp beside a schedule."""
    model = options_in(options.get("model"))
    lr = model.get("lr")
    for part, name in (("optimizer", "lr"), ("lr_scheduler", "max_lr")):
        other = option_of(options.get(part), name)
        if lr is not None and other is not None and other != lr:
            problem = f"--{part}.{name}={other} and --model.lr={lr} are two learning rates"
            raise InputError(f"{problem}: give both the same value")

    if options.get("lr_scheduler") and not options.get("optimizer"):
        raise InputError(
            "--lr_scheduler has no effect without --optimizer: give the optimiser, too"
        )
    ramp = model.get("lr_ramp_up_images")
    if options.get("lr_scheduler") and ramp:
        problem = f"--model.lr_ramp_up_images={ramp} has no effect beside --lr_scheduler"
        raise InputError(f"{problem}: set it to 0, and warm up by the schedule")


def _about_tasks_of_slurm() -> str:
    """Return words on the variables of SLURM that do not fit the trainer; Lightning names only options of a script."""
    names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    known = " and ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    problem = f"the environment has {known}, which does not fit these options"
    return f"{problem}: unset it, or give `#SBATCH --ntasks-per-node` the number of devices"


@contextmanager
def explained(options: Namespace) -> Iterator[None]:
    """Turn Lightning's refusal of trainer options into an InputError, with the values of the options for devices."""
    try:
        yield
    except InputError:
        raise
    except REFUSALS as error:
        reason = joined_lines(error) or type(error).__name__
        if "--ntasks-per-node" in reason:
            reason = _about_tasks_of_slurm()

        values = []
        for name in ("accelerator", "devices", "strategy", "precision"):
            if options[name] not in (None, "auto"):
                values.append(f"trainer.{name}={options[name]}")
        if values:
            reason += f" ({', '.join(values)})"
        raise InputError(f"trainer: {reason}") from error
