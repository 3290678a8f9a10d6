"""The commands of `lit-knn`, one a file; `cli` has what fit, validate, predict, plan and best share."""
