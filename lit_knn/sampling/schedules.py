"""EDM's distribution of noise levels in training, and the schedules and loss weights of EDM, iCT and ECT.

iCT is Song & Dhariwal 2023; ECT is Geng et al. 2024, arXiv 2406.14548.
"""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lit_knn.common.errors import InputError, check_at_least, check_not_negative

# Networks compute in float32, in which t and r are the same number if their relative gap is smaller than this.
SMALLEST_GAP = 2.0**-23


def log_normal_sigmas(
    size: int, P_mean: float = -1.2, P_std: float = 1.2, generator: Generator | None = None
) -> Tensor:
    """Draw EDM's training noise levels, ln σ ~ N(P_mean, P_std²), (size,) float64 (Karras et al. 2022, Table 1).

    They are on the device of `generator`.

    Args:
        size: number of levels.
        P_mean: mean of ln σ.
        P_std: standard deviation of ln σ.
        generator: the source of randomness; by default PyTorch's own, on the CPU.
    """
    device = generator.device if generator is not None else None
    normal = torch.randn(size, dtype=torch.float64, generator=generator, device=device)
    return (P_mean + P_std * normal).exp()


def truncated_log_normal_sigmas(
    size: int, P_mean: float, P_std: float, low: float, high: float, generator: Generator
) -> Tensor:
    """Draw noise levels, ln σ ~ N(P_mean, P_std²) between two ends, (size,) float64, on the device of `generator`.

    Args:
        size: number of levels.
        P_mean: mean of ln σ, before the cut.
        P_std: standard deviation of ln σ, before the cut.
        low: smallest level.
        high: largest level.
        generator: the source of randomness.
    """
    ends = (torch.tensor([low, high], dtype=torch.float64).log() - P_mean) / P_std
    first, last = torch.special.ndtr(ends).tolist()
    if not first < last:
        raise InputError(
            f"P_mean={P_mean}, P_std={P_std} leave no probability between {low} and {high}"
        )
    uniform = torch.rand(size, dtype=torch.float64, generator=generator, device=generator.device)
    normal = torch.special.ndtri(first + (last - first) * uniform)
    return (P_mean + P_std * normal).exp().clamp(low, high)


def ict_num_steps(step: int, total_steps: int = 400_000, s0: int = 10, s1: int = 1280) -> int:
    """Return iCT's number of grid points N(k), from s0 + 1 to s1 + 1. It is one more than the number of intervals.

    The number of intervals starts at s0 and doubles every K/(log2⌊s1/s0⌋ + 1) iterations, up to s1.

    Args:
        step: training iteration k, from 0.
        total_steps: training iterations K.
        s0: intervals at the start.
        s1: intervals at the end.
    """
    check_at_least(1, total_steps=total_steps)
    if not 1 <= s0 <= s1:
        raise InputError(f"need 1 <= s0 <= s1, got s0={s0} and s1={s1}")
    # The floor of s1/s0 is the paper's. With other ratios than powers of 2 the last doubling overshoots s1.
    period = max(math.floor(total_steps / (math.log2(s1 // s0) + 1)), 1)
    doublings = min(step // period, math.ceil(math.log2(s1 / s0)))
    return min(s0 * 2**doublings, s1) + 1


def lognormal_step_probs(sigmas: Tensor, P_mean: float = -1.1, P_std: float = 2.0) -> Tensor:
    """Return the probabilities p(i) of the intervals of a grid: iCT's discretised log-normal distribution.

    p(i) ∝ erf((ln t_i − P_mean) / (√2·P_std)) − erf((ln t_{i−1} − P_mean) / (√2·P_std)).

    Args:
        sigmas: (N,), ascending noise levels t_1 … t_N.
        P_mean: mean of ln t.
        P_std: standard deviation of ln t.

    Returns:
        (N − 1,), float64, sums to 1. Entry j belongs to the pair (sigmas[j], sigmas[j + 1]), which the paper counts as
        (t_{j+1}, t_{j+2}).
    """
    # The distribution function is (1 + erf)/2. The 1 falls out of the differences, and the 2 out of the quotient.
    erf = torch.erf((sigmas.double().log() - P_mean) / (math.sqrt(2) * P_std))
    mass = erf.diff()
    return mass / mass.sum()


@dataclass(frozen=True)
class TuningSchedule:
    """ECT's map from the student's level t to the teacher's r < t, which approaches t from stage to stage.

    r = t·(1 − n(t)/q^a) with n(t) = 1 + k·sigmoid(−b·t) in stage a = 1, 2, …; where this is negative, r = 0, as in
    arXiv 2406.14548 and `t_to_r_sigmoid` of github.com/locuslab/ect. At r = 0 the teacher is the target of denoising.

    Attributes:
        q: factor by which the gap 1 − r/t shrinks from one stage to the next.
        k: widens the gap at small t, to 1 + k/2 times its size at large t.
        b: how fast this widening falls with t.
        steps: training steps in a stage, d in the paper.
        stages: number of stages. The last one lasts to the end of the training; the paper has no last one.
    """

    q: float = 2.0
    k: float = 8.0
    b: float = 1.0
    steps: int = 25_000
    stages: int = 8

    def __post_init__(self) -> None:
        if not 1 < self.q < math.inf:
            reason = "because the gap shrinks by q in each stage"
            raise InputError(f"q must be above 1 and finite, {reason}, got {self.q}")
        check_not_negative(k=self.k, b=self.b)
        check_at_least(1, stage_steps=self.steps, stages=self.stages)
        # In the last stage the gap is at least q^−stages.
        if self.stages * math.log2(self.q) > -math.log2(SMALLEST_GAP):
            raise InputError(
                f"q={self.q} and stages={self.stages} leave r within float32's rounding of t in "
                f"the last stage: q^stages must be at most {1 / SMALLEST_GAP:.0f}"
            )

    def stage(self, step: int) -> int:
        """Return the stage a of a training step, which counts from 0."""
        return min(step // self.steps + 1, self.stages)

    def check_reaches(self, highest: float) -> None:
        """Raise InputError if r = 0 at all t up to `highest`, even in the last stage.

        Then r would never approach t.
        """
        t = torch.tensor([highest], dtype=torch.float64)
        r = self.teacher_level(t, self.stages).item()
        if not r > 0:
            raise InputError(
                f"q={self.q}, k={self.k}, b={self.b} and stages={self.stages} leave r = 0 at all t "
                f"up to {highest:g} in the last stage, so r never approaches t: "
                "raise q or stages, or lower k"
            )

    def teacher_level(self, t: Tensor, stage: int) -> Tensor:
        """Return the teacher's level r for t, (B,) float64, in a stage: 0 <= r < t."""
        n = 1 + self.k * torch.sigmoid(-self.b * t)
        return (t * (1 - n / self.q**stage)).clamp(min=0)


def edm_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """Return EDM's loss weight λ(σ) = (σ² + σ_data²)/(σ·σ_data)² (Karras et al. 2022, Table 1); (B,)."""
    return (sigma.square() + sigma_data**2) / (sigma * sigma_data).square()


def consistency_weight(t: Tensor, t_prev: Tensor) -> Tensor:
    """Return the loss weight of iCT and ECT, λ(t_i) = 1 / (t_i − t_{i−1}), (B,)."""
    return 1 / (t - t_prev)
