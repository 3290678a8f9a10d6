"""The command `export`: a run's weights as safetensors, with a configuration and a model card."""

from lit_knn.export.command import export, main

__all__ = ["export", "main"]
