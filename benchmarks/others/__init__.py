"""Runs other people's estimators beside ours: see `benchmarks.others.__main__`."""
