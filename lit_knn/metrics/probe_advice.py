"""What a probe says of the estimators: what each removes and costs, and which one to take."""

import math
from collections.abc import Mapping

from lit_knn.metrics.probe_shares import FEWEST_LATENTS, Remainder, Training

# The least share of noise that is written as a number.
LEAST_WRITTEN = 1e-4
# Below this number of images there is a warning: on 1,000 photographs the exact target made the loss at new images
# worse, and on 5,000 it made no difference.
FEW_IMAGES = 5000


def advice_to_take(
    best: str | None,
    remainders: Mapping[str, Remainder],
    training: Training,
) -> str:
    """Name the cheapest estimator that leaves little noise, and its time beside the network's.

    Args:
        best: the estimator; None if no estimator leaves little, or if that cannot be told.
        remainders: what each estimator leaves.
        training: the training.
    """
    if best is None:
        if all(math.isnan(each.share) for each in remainders.values()):
            return (
                f"Fewer than {FEWEST_LATENTS} latents carry the target noise of {training.name}, "
                "so no share of it can be told; more --latents can help."
            )
        return "None of these estimators leaves less than 1 % of the noise of one sample."

    beside = ""
    if training.pass_ms is not None:
        beside = f", beside {training.pass_ms:.2g} ms of a pass of the network"
    return (
        "The cheapest estimator that leaves less than 1 % of the noise of one sample is "
        f"{best}: {remainders[best].ms:.2g} ms an image{beside}."
    )


def advice_on_few_images(images: int) -> list[str]:
    """Say that better targets may harm a training on few images; nothing for more of them."""
    if images >= FEW_IMAGES:
        return []
    return [
        f"{images:,} images are few: a network that passes over them hundreds of times may generalise "
        "worse with a better target (docs/evidence.md). Compare it with OneSample on images that "
        "both hold out (--data.held_out)."
    ]


def removal_sentence(name: str, left: Remainder, training: Training) -> str:
    """Say how much noise an estimator removes, and what it costs.

    Args:
        name: the estimator.
        left: what it leaves.
        training: the training.
    """
    cost = f"{left.ms:.2g} ms an image"
    if training.pass_ms is not None:
        cost += f", {left.ms / training.pass_ms:.0%} of a pass of the network"
    if math.isnan(left.share):
        return f"{name} costs {cost}; how much noise it removes cannot be told."
    noise = f"the target noise of {training.name}"
    if left.share > 1:
        return f"{name} errs more than one sample: {left.share:.2f} times {noise}; it costs {cost}."
    return f"{name} removes {removed(left)} of {noise}; it costs {cost}."


def removed(left: Remainder) -> str:
    """Write the share that an estimator removes, with its standard error rounded up."""
    share = min(1 - left.share, 1 - LEAST_WRITTEN)
    if math.isnan(left.standard_error):
        return f"about {share:.2%}"
    if left.share + 2 * left.standard_error < LEAST_WRITTEN:
        return f"more than {1 - LEAST_WRITTEN:.2%}"

    error = math.ceil(left.standard_error / LEAST_WRITTEN) * LEAST_WRITTEN
    return f"{share:.2%} ± {error:.2%}"
