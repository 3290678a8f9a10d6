"""The callbacks of `lit_knn.callbacks` by the short name `callbacks.X`, for configs and scripts of a checkout."""

from lit_knn.callbacks import *  # noqa: F403
from lit_knn.callbacks import __all__ as __all__
