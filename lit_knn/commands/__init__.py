"""The commands of `lit-knn`, one in each file; `cli` has the shared code of fit, validate, predict, plan and best."""
