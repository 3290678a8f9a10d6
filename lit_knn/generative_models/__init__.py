"""Trained networks that draw images, in plain PyTorch: a class for each kind of model, with its sampler.

The Lightning modules sample through these classes, and `lit_knn.load` returns them.
"""

from lit_knn.generative_models.base import GenerativeModel
from lit_knn.generative_models.consistency import ConsistencyModel
from lit_knn.generative_models.diffusion import DiffusionModel
from lit_knn.generative_models.flow import FlowModel

KINDS: dict[str, type[GenerativeModel]] = {model.kind: model for model in (ConsistencyModel, DiffusionModel, FlowModel)}
"""The kinds of models that a file can name."""

__all__ = ["KINDS", "ConsistencyModel", "DiffusionModel", "FlowModel", "GenerativeModel"]
