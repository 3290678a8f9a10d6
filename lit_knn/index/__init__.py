"""Neighbour indexes for reference sets."""

from lit_knn.index.base import Index
from lit_knn.index.faiss_index import FaissIndex
from lit_knn.index.subspace_index import SubspaceIndex
from lit_knn.index.torch_index import FlatIndex, TorchIndex, default_index

__all__ = ["FaissIndex", "FlatIndex", "Index", "SubspaceIndex", "TorchIndex", "default_index"]
