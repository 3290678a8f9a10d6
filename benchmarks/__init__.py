"""Benchmark scripts; run them from a checkout as `python -m benchmarks.NAME`."""
