"""The commands of `lit-knn`. `cli` has the code that fit, validate, predict, plan, probe and best share."""
