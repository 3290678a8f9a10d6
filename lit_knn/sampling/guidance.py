"""Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598) moves a sample towards its class."""

from collections.abc import Callable

from torch import Tensor

from lit_knn.common.errors import InputError, check_not_negative

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(z (B, *shape), t (B,)) -> (B, *shape): a denoiser, a score, a velocity or predicted noise."""


def guided(conditional: Denoiser, unconditional: Denoiser, guidance: float) -> Denoiser:
    """Return D_w = D(z; none) + w·(D(z; class) − D(z; none)).

    w = 1 is the conditional function itself, w = 0 the unconditional one, and w > 1 moves further away from the average
    of all classes. Ho & Salimans write 1 + w for this w. Guiding the denoiser, the score or the velocity has the same
    effect, because at a given z and t each is an affine function of the others, which does not depend on the class.

    Args:
        conditional: D(z; class).
        unconditional: D(z; none).
        guidance: w.
    """
    if guidance == 1:
        return conditional
    if guidance == 0:
        return unconditional

    def mix(z: Tensor, t: Tensor) -> Tensor:
        without = unconditional(z, t)
        return without + guidance * (conditional(z, t) - without)

    return mix


def check_guidance(guidance: float, num_classes: int, drops_labels: bool) -> float:
    """Return w as a float; raise InputError if the network cannot use it.

    Only w = 1 is allowed if the network has no classes, or if its training had no items without a class.

    Args:
        guidance: w.
        num_classes: number of classes of the network.
        drops_labels: whether its training hid some class labels.
    """
    check_not_negative(guidance=guidance)
    if guidance != 1:
        needs = f"guidance={guidance} needs a"
        if num_classes == 0:
            raise InputError(f"{needs} class-conditional network, but the net has num_classes=0")
        if not drops_labels:
            raise InputError(
                f"{needs} network that was trained without classes, too (label_dropout)"
            )
    return float(guidance)
