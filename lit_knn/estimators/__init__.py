"""Score estimators. Each estimates the posterior mean E[x|z,t] over a reference set."""

from lit_knn.estimators.base import Estimator
from lit_knn.estimators.by_class import ByClass, class_conditional
from lit_knn.estimators.certificate import Certificate, DrawingEstimator
from lit_knn.estimators.exact import Exact
from lit_knn.estimators.knn import KNN
from lit_knn.estimators.mixed import Mixed
from lit_knn.estimators.monte_carlo import MonteCarlo
from lit_knn.estimators.network import Network
from lit_knn.estimators.noised import Noised
from lit_knn.estimators.one_sample import OneSample
from lit_knn.estimators.patch_posterior import PatchPosterior
from lit_knn.estimators.pca_locality import PCALocality
from lit_knn.estimators.query import Query
from lit_knn.estimators.smoothed import Smoothed
from lit_knn.estimators.stf import STF, UniformSNIS
from lit_knn.estimators.subspace_knn import SubspaceKNN
from lit_knn.estimators.switched import Switched
from lit_knn.estimators.wiener import Wiener

__all__ = [
    "KNN",
    "STF",
    "ByClass",
    "Certificate",
    "DrawingEstimator",
    "Estimator",
    "Exact",
    "Mixed",
    "MonteCarlo",
    "Network",
    "Noised",
    "OneSample",
    "PCALocality",
    "PatchPosterior",
    "Query",
    "Smoothed",
    "SubspaceKNN",
    "Switched",
    "UniformSNIS",
    "Wiener",
    "class_conditional",
]
