"""The option `--samples`: one number of samples for all callbacks that measure samples."""

from pkgutil import resolve_name

from jsonargparse import Namespace

from lit_knn.callbacks import Fidelity, HybridSampling, Memorisation
from lit_knn.common.errors import InputError

SAMPLING = (Fidelity, HybridSampling, Memorisation)
SAMPLES_HELP = "number of samples of all callbacks that measure samples, in place of num_samples"


def set_samples(options: Namespace, command: str | None) -> None:
    """Give the number of samples to the callbacks of a command line; refuse it if none samples.

    The settings of the run then have the number once, as an option of each callback.

    Args:
        options: the parsed options of the command, changed in place.
        command: name of the command.
    """
    number = options.get("samples")
    options["samples"] = None
    if number is None:
        return

    if command == "predict":
        advice = f"give --data.predict_samples {number}"
        raise InputError(f"--samples {number} is for fit and validate: {advice}")

    callbacks = options.trainer.callbacks or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    sampling = [each for each in callbacks if issubclass(resolve_name(each.class_path), SAMPLING)]
    if not sampling:
        rule = "no callback of this run measures samples, as Fidelity does"
        raise InputError(f"--samples {number}: {rule}")

    for callback in sampling:
        callback.init_args["num_samples"] = number
