"""Other people's estimators, run from checkouts that the user names, see docs/referee.md. No code of theirs is here."""

from lit_knn.referee.adapters.adapter import Adapter
from lit_knn.referee.adapters.plai import KNNScore, KNNScoreSTF
from lit_knn.referee.adapters.stf import STFTarget

__all__ = ["Adapter", "KNNScore", "KNNScoreSTF", "STFTarget"]
