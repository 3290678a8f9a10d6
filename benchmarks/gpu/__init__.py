"""Checks and measures everything that runs on a GPU, in one command: see `benchmarks.gpu.__main__`."""
