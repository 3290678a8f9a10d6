"""Learning curves of training modules by estimator: many small trainings, their table and picture."""
