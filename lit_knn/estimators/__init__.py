"""Score estimators: each estimates the posterior mean E[x|z,t] over a reference set."""

from lit_knn.estimators.adaptive import Adaptive
from lit_knn.estimators.base import Estimator
from lit_knn.estimators.exact import Exact
from lit_knn.estimators.knn import KNN
from lit_knn.estimators.monte_carlo import MonteCarlo
from lit_knn.estimators.network import Network
from lit_knn.estimators.one_sample import OneSample
from lit_knn.estimators.stf import STF
from lit_knn.estimators.subspace_knn import SubspaceKNN
from lit_knn.estimators.uniform_snis import UniformSNIS
from lit_knn.estimators.wiener import Wiener

__all__ = [
    "KNN",
    "STF",
    "Adaptive",
    "Estimator",
    "Exact",
    "MonteCarlo",
    "Network",
    "OneSample",
    "SubspaceKNN",
    "UniformSNIS",
    "Wiener",
]
