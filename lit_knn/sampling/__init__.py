"""Steps of the ODE, noise levels, samplers, and trained networks that draw images, in plain PyTorch.

The Lightning modules sample through the classes of `KINDS`, and `lit_knn.load` returns them.
"""

from lit_knn.sampling.consistency_model import ConsistencyModel
from lit_knn.sampling.diffusion_model import DiffusionModel
from lit_knn.sampling.flow_model import FlowModel
from lit_knn.sampling.hybrid_sampler import hybrid_sampler
from lit_knn.sampling.mean_flow_model import MeanFlowModel
from lit_knn.sampling.model import GenerativeModel
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.samplers import consistency_sampler, heun_sampler
from lit_knn.sampling.schedules import ict_num_steps
from lit_knn.sampling.solvers import euler_step, heun_step

MODELS = ConsistencyModel, DiffusionModel, FlowModel, MeanFlowModel
KINDS: dict[str, type[GenerativeModel]] = {model.kind: model for model in MODELS}
"""The kinds of models that a file can name."""

__all__ = [
    "KINDS",
    "ConsistencyModel",
    "DiffusionModel",
    "FlowModel",
    "GenerativeModel",
    "MeanFlowModel",
    "consistency_sampler",
    "euler_step",
    "heun_sampler",
    "heun_step",
    "hybrid_sampler",
    "ict_num_steps",
    "karras_sigmas",
]
