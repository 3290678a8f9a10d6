"""Other people's estimators, run from checkouts that the user names, see docs/referee.md. No code of theirs is here."""

from lit_knn.referee.adapters.adapter import Adapter
from lit_knn.referee.adapters.convolutional_diffusion import KambEquivariant
from lit_knn.referee.adapters.plai import KNNScore, KNNScoreSTF, PSPCEmpirical, PSPCSquare
from lit_knn.referee.adapters.stf import STFTarget
from lit_knn.referee.adapters.studio import GoldDiff, StudioOptimal, StudioPCALocality, StudioWiener

__all__ = [
    "Adapter",
    "GoldDiff",
    "KNNScore",
    "KNNScoreSTF",
    "KambEquivariant",
    "PSPCEmpirical",
    "PSPCSquare",
    "STFTarget",
    "StudioOptimal",
    "StudioPCALocality",
    "StudioWiener",
]
