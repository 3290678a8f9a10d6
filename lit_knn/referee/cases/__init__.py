"""The cases of the referee: frozen data, latents and exact means."""

from lit_knn.referee.cases.case import Case
from lit_knn.referee.cases.loading import LoadedCase, load_case
from lit_knn.referee.cases.registry import CASES, case_named

__all__ = ["CASES", "Case", "LoadedCase", "case_named", "load_case"]
