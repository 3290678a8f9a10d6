"""Trained models for use elsewhere: `load` reads them from any file, in plain PyTorch."""

from lit_knn.hand_over.loading import load

__all__ = ["load"]
