"""Checks trainer options and learning rates whose errors Lightning reports late or never."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lit_knn.common.errors import InputError, check_at_least, prefixed

# Lightning takes 0 for these counts of steps, and the training then fails or, below 0, counts wrongly.
COUNTS = ("accumulate_grad_batches", "log_every_n_steps", "val_check_interval")
# With 0 for these, their command would do nothing.
WORK = dict.fromkeys(("limit_train_batches", "max_steps", "max_epochs"), "fit")
WORK |= {"limit_val_batches": "validate", "limit_predict_batches": "predict"}
PRECISIONS = ("32-true", "32", "16-mixed", "16", "bf16-mixed", "bf16")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def check_trainer_options(options: Mapping[str, Any], command: str) -> None:
    """Refuse the first option of the trainer that is out of its range."""
    for name, its_command in WORK.items():
        if command == its_command and options.get(name) == 0:
            raise InputError(f"trainer.{name} must be above 0: {command} would do nothing")
    with prefixed("trainer"):
        check_at_least(
            1, **{name: options[name] for name in COUNTS if type(options.get(name)) is int}
        )
    clip = options.get("gradient_clip_val")
    if clip is not None and not clip >= 0:  # Lightning would not clip at all, or fail at NaN.
        raise InputError(f"trainer.gradient_clip_val must be at least 0, got {clip}")
    precision = options.get("precision")
    if precision is not None and str(precision) not in PRECISIONS:
        raise InputError(
            f"trainer.precision={precision} is not one of 32-true, bf16-mixed and 16-mixed"
        )


def validated_at_the_end(options: Mapping[str, Any]) -> dict[str, int]:
    """Return another `val_check_interval` for a run that would end before its first validation."""
    steps, every = options["max_steps"], options["val_check_interval"]
    batches = steps * (options["accumulate_grad_batches"] or 1)
    counts = type(every) is int and options["check_val_every_n_epoch"] is None
    return {"val_check_interval": batches} if counts and 0 < batches < every else {}


def warn_of_unused_gpu(options: Mapping[str, Any]) -> None:
    """Warn if a run that takes any device is on the CPU, although the machine has an NVIDIA driver."""
    if (
        options.get("accelerator") in (None, "auto")
        and NVIDIA_DRIVER.exists()
        and not torch.cuda.is_available()
    ):
        problem = f"this machine has an NVIDIA driver, but PyTorch {torch.__version__} finds no GPU"
        advice = "the driver may be too old, see docs/troubleshooting.md"
        rank_zero_warn(f"{problem}, so the run is on the CPU; {advice}")


def check_learning_rate(options: Mapping[str, Any]) -> None:
    """Refuse options without effect: modules with `lr_ramp_up_images` set the learning rate at every step."""
    parts = ("model", "optimizer", "lr_scheduler")
    model, optimiser, schedule = ((options.get(part) or {}).get("init_args", {}) for part in parts)
    lr = model.get("lr")
    others = {
        "optimizer.lr": optimiser.get("lr"),
        "lr_scheduler.max_lr": schedule.get("max_lr"),
    }
    for name, other in others.items():
        if lr is not None and other is not None and other != lr:
            problem = f"--{name}={other} and --model.lr={lr} are two learning rates"
            raise InputError(f"{problem}: give both the same value")

    if options.get("lr_scheduler") and not options.get("optimizer"):
        raise InputError(
            "--lr_scheduler has no effect without --optimizer: give the optimiser, too"
        )
    ramp = model.get("lr_ramp_up_images")
    if options.get("lr_scheduler") and ramp:
        problem = f"--model.lr_ramp_up_images={ramp} sets the learning rate at every step"
        advice = "set it to 0, and warm up by the schedule"
        raise InputError(f"{problem}, so --lr_scheduler would have no effect: {advice}")


def _about_tasks_of_slurm() -> str:
    """Say which variables of SLURM do not fit. Lightning names options of a batch script."""
    names = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    known = " and ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    problem = f"the environment has {known}, which does not fit these options"
    return f"{problem}: unset it, or give `#SBATCH --ntasks-per-node` the number of devices"


def explain(error: Exception, options: Mapping[str, Any]) -> str:
    """Return Lightning's reason for refusing trainer options, and the values of the options for devices."""
    names = ("accelerator", "devices", "strategy", "precision")
    values = []
    for name in names:
        if options.get(name) not in (None, "auto"):
            values.append(f"trainer.{name}={options[name]}")

    reason = " ".join(str(error).split()) or type(error).__name__
    if "--ntasks-per-node" in reason:
        reason = _about_tasks_of_slurm()
    if values:
        reason += f" ({', '.join(values)})"
    return f"trainer: {reason}"
