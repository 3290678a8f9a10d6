"""The Lightning modules, each of which trains or measures one kind of generative model."""

from lit_knn.modules.ect import LitECT
from lit_knn.modules.edm import LitEDM
from lit_knn.modules.estimator import LitEstimator
from lit_knn.modules.flow import LitFlow
from lit_knn.modules.ict import LitICT
from lit_knn.modules.mean_flow import LitMeanFlow
from lit_knn.modules.score_difference import LitScoreDifference
from lit_knn.modules.sct import LitSCT

__all__ = [
    "LitECT",
    "LitEDM",
    "LitEstimator",
    "LitFlow",
    "LitICT",
    "LitMeanFlow",
    "LitSCT",
    "LitScoreDifference",
]
