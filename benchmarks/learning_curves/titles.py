"""The measures that the report shows, with their titles."""

FINAL = {
    "fd_features": "Fréchet distance, features",
    "fd_pixels": "Fréchet distance, pixels",
    "fd_pixels_two_steps": "pixels, two steps",
    "precision": "precision",
    "recall": "recall",
    "copied_fraction": "copied",
    "nearest_features": "nearest, features",
    "held_out_loss": "loss at held-out images",
    "val_error": "error at held latents",
    "variance_ratio": "gradient variance / one-sample's",
    "relative_noise": "gradient noise / norm",
    "bias_ratio": "gradient bias² / one-sample variance",
    "one_sample_bias_ratio": "of one-sample targets",
    "distance_to_exact": "distance to `Exact`, new images",
    "distance_to_patches": "to `PatchPosterior`",
    "distance_to_smoothed": "to `Smoothed`",
}
TIMES = {"cpu_seconds": "CPU s", "estimator_share": "estimator's share"}
# Estimators are compared by these measures.
COMPARED = (
    "fd_features",
    "fd_pixels",
    "fd_pixels_two_steps",
    "recall",
    "held_out_loss",
    "val_error",
    "distance_to_exact",
    "distance_to_patches",
    "distance_to_smoothed",
)
# Tables of differences explain their intervals by this sentence.
INTERVALS = (
    "Each 95 % t-interval holds alone; bold if it excludes 0, and † if it does so with Bonferroni's rule for its "
    "column, too."
)
