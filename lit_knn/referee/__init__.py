"""Measures any estimator of the posterior mean on frozen cases, beside a reference estimator."""
