"""The posterior mean of augmented items: the mean over the reference set, augmented like each item."""

import torch
from torch import Tensor

from lit_knn.common.memory import to_device
from lit_knn.estimators import Estimator
from lit_knn.modules.augmentation import Augmented
from lit_knn.theory.warp import flip


def augmented_mean(
    estimator: Estimator,
    z: Tensor,
    sigma: Tensor,
    x: Tensor,
    class_label: Tensor | None,
    augmented: Augmented,
    generator: torch.Generator,
    warp: bool,
) -> Tensor:
    """Estimate each item's posterior mean in the EDM process, (B, *shape).

    An item that is not warped, but perhaps flipped, is mirrored for the estimate, and its mean is mirrored back. Both
    estimates run even for zero items, because a sharded reference set needs all ranks in each call.

    Args:
        estimator: the estimator, bound.
        z: (B, *shape), latents of the augmented items.
        sigma: (B,) float64, their noise levels.
        x: (B, *shape), clean items before augmentation.
        class_label: (B,) int64, or None.
        augmented: the augmented items.
        generator: source of the estimator's draws.
        warp: whether warped items get the mean over the warped set; otherwise they get the item itself.
    """

    def labels_of(rows: Tensor) -> Tensor | None:
        return None if class_label is None else class_label[rows.to(class_label.device)]

    unwarped_rows = (~augmented.warped).nonzero()[:, 0]
    warped_rows = augmented.warped.nonzero()[:, 0]
    unwarped = to_device(unwarped_rows, z.device)
    warped = to_device(warped_rows, z.device)

    # A flip is its own inverse, so the same call undoes it.
    flips = augmented.warp.flips[unwarped]
    mean = estimator.posterior_mean(
        flip(z[unwarped], flips),
        sigma[unwarped],
        x_source=x[unwarped],
        generator=generator,
        labels=labels_of(unwarped_rows),
    )
    result = augmented.images.index_copy(0, unwarped, flip(mean, flips))
    if not warp:
        return result

    mean = estimator.warped_mean(
        z[warped],
        sigma[warped],
        warp=augmented.warp.rows(warped),
        x_source=x[warped],
        generator=generator,
        labels=labels_of(warped_rows),
    )
    return result.index_copy(0, warped, mean)
