"""Diffusion generative models with plug-in score estimators."""
