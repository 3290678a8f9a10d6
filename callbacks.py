"""The callbacks by their short name, `callbacks.X`, which configs and scripts of a checkout use: see `lit_knn.callbacks`."""

from lit_knn.callbacks import *  # noqa: F403
from lit_knn.callbacks import __all__ as __all__
