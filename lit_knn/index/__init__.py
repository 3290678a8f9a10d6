"""Neighbour indexes for reference sets."""

from lit_knn.index.base import Index
from lit_knn.index.faiss_index import FaissIndex
from lit_knn.index.subspace_index import SubspaceIndex
from lit_knn.index.torch_index import TorchIndex

__all__ = ["FaissIndex", "Index", "SubspaceIndex", "TorchIndex"]
