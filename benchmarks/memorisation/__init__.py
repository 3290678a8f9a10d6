"""Memorisation over training time against the number of images N: when a network begins to copy."""
