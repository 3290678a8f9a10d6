"""Checks that options of the optimiser do not contradict those of the model."""

from collections.abc import Mapping
from typing import Any

from lit_knn.common.errors import InputError


def check_learning_rate(options: Mapping[str, Any]) -> None:
    """Refuse options of which one would silently replace the other.

    The modules that grow the learning rate over the first images set it at every step, so neither another `lr` of the
    optimiser nor a schedule would have an effect.

    Raises:
        InputError: the optimiser's `lr` is not the model's; a schedule beside `model.lr_ramp_up_images`.
    """
    optimiser, schedule = ((options.get(name) or {}).get("init_args", {}) for name in ("optimizer", "lr_scheduler"))
    model = (options.get("model") or {}).get("init_args", {})
    own, given = model.get("lr"), optimiser.get("lr")
    if options.get("optimizer") and own is not None and given is not None and float(given) != float(own):
        raise InputError(
            f"--optimizer.lr={given} and --model.lr={own} are two learning rates: give both the same value"
        )
    ramp = model.get("lr_ramp_up_images")
    if options.get("lr_scheduler") and ramp:
        raise InputError(
            f"--model.lr_ramp_up_images={ramp} sets the learning rate at every step, so that --lr_scheduler would have "
            "no effect: set it to 0, and warm up by the schedule"
        )
    highest = schedule.get("max_lr")
    if options.get("lr_scheduler") and own is not None and highest is not None and highest != own:
        raise InputError(
            f"--lr_scheduler.max_lr={highest} and --model.lr={own} are two learning rates: give both the same value"
        )
