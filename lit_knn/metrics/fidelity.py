"""Feature distances between sets of images, such as FID, and the Inception Score."""

import numpy as np
import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.metrics.data_statistics import num_compared
from lit_knn.metrics.feature_statistics import FeatureStatistics, image_statistics, set_of_images
from lit_knn.metrics.features import FeatureExtractor
from lit_knn.reference import ReferenceSet

INCEPTION_SCORE_SPLITS = 10
KID_SUBSETS = 100


def frechet_distance(
    samples: Tensor | np.ndarray | ReferenceSet,
    data: Tensor | np.ndarray | ReferenceSet,
    extractor: FeatureExtractor,
) -> float:
    """Compute the Fréchet distance between the features of samples and data; with `InceptionV3` it is FID.

    To compare one set several times, keep its statistics:
    `frechet_distance_of_statistics(image_statistics(samples, extractor), known)`.

    Args:
        samples: see `image_statistics`.
        data: see `image_statistics`.
        extractor: computes the features.

    Raises:
        InputError: samples and data have other shapes, or fewer than two images.
    """
    sets = {"samples": set_of_images(samples), "data": set_of_images(data)}
    for name, images in sets.items():
        if num_compared(images) < 2:
            raise InputError(f"frechet_distance: {name} must be at least two images")
    shapes = [images.shape for images in sets.values()]
    if shapes[0] != shapes[1]:
        difference = f"samples have shape {shapes[0]}, and data {shapes[1]}"
        raise InputError(f"frechet_distance: {difference}: give images of the same kind")

    a, b = (image_statistics(images, extractor) for images in sets.values())
    return frechet_distance_of_statistics(a, b.to(a.mean.device))


def frechet_distance_of_statistics(
    a: FeatureStatistics, b: FeatureStatistics, factor: Tensor | None = None
) -> float:
    """Compute the squared Fréchet distance of two Gaussians, ‖m − m'‖² + Tr(C + C' − 2(C C')^½).

    Args:
        a: statistics of the first set.
        b: statistics of the second set.
        factor: `factor_of(b.cov)`, if known, which saves half of the time.
    """
    for name, statistics in (("first", a), ("second", b)):
        if not (statistics.mean.isfinite().all() and statistics.cov.isfinite().all()):
            features = f"the features of the {name} set, of {statistics.count} images"
            raise InputError(f"{features}, are not finite")
    # Tr (C C')^½ is the sum of the singular values of FᵀF', for C = F Fᵀ and C' = F' F'ᵀ. Their absolute error is about
    # the rounding error. The square roots of the eigenvalues of C C', which is not symmetric, would have errors as
    # large as the square root of the rounding error.
    factor = factor_of(b.cov) if factor is None else factor
    cross = torch.linalg.svdvals(factor_of(a.cov).T @ factor).sum()
    return float((a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * cross)


def factor_of(cov: Tensor) -> Tensor:
    """Return F, (features, r), with cov = F Fᵀ. The rank r of few images is far below the number of features."""
    # LAPACK may fail on rows of zeros, those of features that are equal in all images.
    varies = cov.diagonal() > 0
    part = cov[varies][:, varies]
    if len(part) == 0:
        return cov.new_zeros(len(cov), 0)

    # LAPACK may also fail on a matrix of rounding errors alone, such as that of images which are all alike.
    scale = part.abs().amax().clamp(min=1e-300)
    values, vectors = torch.linalg.eigh(part / scale)
    # Below its rounding error, an eigenvalue is noise. A covariance has no negative ones.
    significant = values > torch.finfo(values.dtype).eps * len(cov) * values[-1].clamp(min=0)
    factor = cov.new_zeros(len(cov), int(significant.sum()))
    factor[varies] = vectors[:, significant] * (values[significant] * scale).sqrt()
    return factor


def inception_score(logits: Tensor) -> dict[str, float]:
    """Compute the Inception Score (Salimans et al. 2016) by torch-fidelity: mean and deviation over ten splits.

    `logits` are (N, L), N >= 10, in the order of the images, which torch-fidelity shuffles.
    """
    from torch_fidelity.metric_isc import isc_features_to_metric

    score = isc_features_to_metric(logits.cpu(), splits=INCEPTION_SCORE_SPLITS)
    return {
        "inception_score": score["inception_score_mean"],
        "inception_score_std": score["inception_score_std"],
    }


def kernel_distance(
    generated: Tensor, real: Tensor, subset_size: int = 1000, subsets: int = KID_SUBSETS
) -> dict[str, float]:
    """Compute KID (Bińkowski et al. 2018) by torch-fidelity: mean `kid` and deviation `kid_std` of random subsets.

    Args:
        generated: (N, F), features.
        real: (M, F), features.
        subset_size: images of each set in a subset, at most N and M.
        subsets: number of subsets.
    """
    from torch_fidelity.metric_kid import kid_features_to_metric

    distance = kid_features_to_metric(
        generated, real, kid_subsets=subsets, kid_subset_size=subset_size, verbose=False
    )
    return {
        "kid": distance["kernel_inception_distance_mean"],
        "kid_std": distance["kernel_inception_distance_std"],
    }
