"""Scripts that measure; run from a checkout as `python benchmarks/NAME.py`."""
