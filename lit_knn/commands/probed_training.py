"""Reads the facts that a probe needs of the training to follow: noise levels, weights of the loss, and time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.stopwatch import Stopwatch
from lit_knn.metrics.edm_constants import EDM
from lit_knn.metrics.probe_shares import Training
from lit_knn.modules import (
    LitEDM,
    LitEstimator,
    LitFlow,
    LitMeanFlow,
    LitScoreDifference,
    LitSCT,
)
from lit_knn.modules.consistency import ConsistencyTraining
from lit_knn.sampling.schedules import consistency_weight, edm_weight, log_normal_sigmas
from lit_knn.sampling.score_difference import stratified_levels

# The number of draws from the noise levels of a training: so many that means over them have smaller errors than those
# over the latents of a probe.
DRAWS = 100_000
# The number of images in a timed pass of the network, and of passes. The fastest counts, because the first one also
# allocates memory, and other programs may slow down single ones.
PASS_IMAGES = 8
PASSES = 4
ADVICE = "give --model LitEstimator, which stands for EDM's, or a subclass of a module of lit_knn"
# A step after the end of any training. Schedules of noise levels are finest at the end, where most of a training is.
LAST_STEP = 2**62


def training_of(model: Any, shape: Sequence[int], seed: int) -> Training:
    """Return the noise levels, the weights and the time of a training of the model.

    Args:
        model: the module. For a LitEstimator, which is not trained, levels and weights are EDM's, without a time.
        shape: shape of an image.
        seed: seed of the draws from the noise levels.

    Raises:
        InputError: the module is of a kind whose levels are not known.
    """
    generator = keyed_generator("cpu", seed, Stream.PROBE)
    name = type(model).__name__

    if isinstance(model, LitEstimator):
        sigma = log_normal_sigmas(DRAWS, generator=generator)
        weight = edm_weight(sigma, EDM["sigma_data"])
        return Training("EDM", sigma.numpy(), weight.numpy(), None)

    if isinstance(model, ConsistencyTraining):
        name += " (to first order, see docs/probe.md)"
        sigma, weight = levels_of_consistency(model, generator)
    elif isinstance(model, LitSCT):
        name += " (to first order, see docs/probe.md)"
        sigma = model.draw_levels(DRAWS, generator)
        # An error of the mean is one of 1/sin(t) times its size in the velocity, and the tangent has cos(t) times that,
        # if f moves as its input does, as for a Gaussian. So this is cot²(t).
        weight = (model.sigma_data / sigma).square()
    elif isinstance(model, LitScoreDifference):
        sigma = stratified_levels(DRAWS, 1, model.ends, generator).flatten()
        weight = model.weight(sigma)
    elif isinstance(model, LitFlow | LitMeanFlow):
        t = model.draw_times(DRAWS, generator)
        sigma = model.process.sigma(t)
        # Their loss is that of the velocity, in which an error of 1 in the mean has this size.
        weight = model.process.velocity(0 * t, t, torch.ones_like(t)).square()
    elif isinstance(model, LitEDM):
        sigma = log_normal_sigmas(DRAWS, model.P_mean, model.P_std, generator)
        weight = edm_weight(sigma, model.sigma_data)
    else:
        raise InputError(f"the noise levels and loss of {name} are not known; {ADVICE}")
    return Training(name, sigma.numpy(), weight.numpy(), milliseconds_of_pass(model, shape))


def levels_of_consistency(
    model: ConsistencyTraining,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return noise levels t of the student, as drawn at the end of the training, and the weight of each.

    In Euler's step from t to r, an error of the estimate μ̂ moves ẑ by (1 − r/t) times the error. So to
    first order, the weight of the squared error in the loss is (1 − r/t)²/(t − r).
    """
    model.loaded_step = LAST_STEP
    t, r = model.draw_levels(DRAWS, generator)
    return t, consistency_weight(t, r) * (1 - r / t).square()


def milliseconds_of_pass(model: Any, shape: Sequence[int]) -> float:
    """Return the milliseconds that a pass of the network, forward and backward, takes for one image."""
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
