"""What a probe needs to know of the training that would follow: levels, weights and time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.metrics.edm_constants import EDM
from lit_knn.metrics.probe_shares import Training
from lit_knn.modules import LitEstimator, LitFlow, LitMeanFlow
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.sampling.schedules import consistency_weight, edm_weight, log_normal_sigmas

# Draws from the noise levels of a training. Their sums err by less than the latents do.
DRAWS = 100_000
# Images in a timed pass of the network, and passes. The first one also allocates, and other
# programs disturb single ones.
PASS_IMAGES = 8
PASSES = 4
# Schedules of noise levels end with the finest, where most of the training is.
LAST_STEP = 2**62


def training_of(model: Any, shape: Sequence[int], seed: int) -> Training:
    """Return what counts of a training. Without a training it is EDM's noise levels and weights.

    Args:
        model: the module.
        shape: shape of an image.
        seed: seed of the draws from the noise levels.
    """
    generator = keyed_generator("cpu", seed, Stream.PROBE)
    name = type(model).__name__

    if isinstance(model, LitEstimator):
        sigma = log_normal_sigmas(DRAWS, -1.2, 1.2, generator)
        weight = edm_weight(sigma, EDM["sigma_data"])
        return Training("EDM", sigma.numpy(), weight.numpy(), None)

    if isinstance(model, ConsistencyTraining):
        name += " (to first order, see docs/probe.md)"
        sigma, weight = levels_of_consistency(model, generator)
    elif isinstance(model, LitFlow | LitMeanFlow):  # Their loss is that of the velocity.
        t = model.draw_times(DRAWS, generator)
        sigma = model.process.sigma(t)
        weight = model.process.velocity(0 * t, t, torch.ones_like(t)).square()
    else:
        P_mean, P_std = getattr(model, "P_mean", -1.2), getattr(model, "P_std", 1.2)
        sigma = log_normal_sigmas(DRAWS, P_mean, P_std, generator)
        weight = edm_weight(sigma, getattr(model, "sigma_data", EDM["sigma_data"]))
    return Training(name, sigma.numpy(), weight.numpy(), milliseconds_of_pass(model, shape))


def levels_of_consistency(
    model: ConsistencyTraining,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw the student's noise levels and weigh them, at the end of the training.

    With Euler's step an error of μ̂ moves ẑ by (1 − r/t) times the error, so to first order the
    weight of its square in the loss is (1 − r/t)²/(t − r).
    """
    model.loaded_step = LAST_STEP
    t, r = model.draw_levels(DRAWS, generator)
    return t, consistency_weight(t, r) * (1 - r / t).square()


def milliseconds_of_pass(model: Any, shape: Sequence[int]) -> float:
    """Return the milliseconds of one image in a pass of the network, forward and backward."""
    device = model.to(model.trainer.strategy.root_device).device
    z = torch.zeros(PASS_IMAGES, *shape, device=device)
    t = torch.ones(PASS_IMAGES, device=device)
    watch = Stopwatch(device)

    seconds = []
    for _ in range(PASSES):
        with watch.running():
            model.evaluate_network(z, t).square().mean().backward()
        seconds.append(watch.read_and_reset())
    return 1000 * min(seconds) / PASS_IMAGES
