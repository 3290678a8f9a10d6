"""Scripts that measure; run from a checkout as `python -m benchmarks.NAME`."""
