"""The option `--samples`, which sets the number of samples of all callbacks that measure samples."""

from pkgutil import resolve_name

from jsonargparse import Namespace

from lit_knn.callbacks import Fidelity, HybridSampling, Memorisation
from lit_knn.common.errors import InputError

SAMPLING = (Fidelity, HybridSampling, Memorisation)
SAMPLES_HELP = "number of samples of all callbacks that measure samples, in place of num_samples"


def set_samples(options: Namespace, command: str | None) -> None:
    """Set `num_samples` of the callbacks that measure samples to the option `samples`, in place.

    The option itself is set to null, so that the settings of the run do not have the number twice.

    Args:
        options: the parsed options of the command.
        command: name of the command.

    Raises:
        InputError: no callback measures samples, or the command is `predict`, which has another option.
    """
    number = options.get("samples")
    options["samples"] = None
    if number is None:
        return

    if command == "predict":
        advice = f"give --data.predict_samples {number}"
        raise InputError(f"--samples {number} is not for predict: {advice}")

    callbacks = options.trainer.callbacks or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    sampling = [each for each in callbacks if issubclass(resolve_name(each.class_path), SAMPLING)]
    if not sampling:
        rule = "no callback of this run measures samples, as Fidelity does"
        raise InputError(f"--samples {number}: {rule}")

    for callback in sampling:
        callback.init_args["num_samples"] = number
