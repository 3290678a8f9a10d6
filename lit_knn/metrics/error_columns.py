"""The columns of the table of an error curve, for Figure 3 (fig:estimator_perf)."""

from collections.abc import Mapping

from lit_knn.common.tables import Row
from lit_knn.metrics.estimator_error import MeanAndError, bias_share
from lit_knn.metrics.measure import CERTIFIED, TIME

ERRORS = ("mse", "bias_sq", "bias_sq_corrected", "variance")
# Columns of the quantities that `measure_estimator` returns besides the errors.
COLUMNS = dict(zip(CERTIFIED, CERTIFIED, strict=True)) | {
    "recall": "search_recall",
    "found_mass": "posterior_mass_found",
    "normaliser_ratio": "Zq_over_pt",
    "eq12_variance": "eq12_variance",
    "bound_4_1": "theorem_4_1_bound",
    "bound_4_2": "theorem_4_2_bound",
    TIME: TIME,
}


def columns_of(means: Mapping[str, MeanAndError], t: float) -> Row:
    """Return the columns of one estimator at noise level t; a quantity that it lacks is "".

    `ErrorCurve.levels` explains the columns.

    Args:
        means: means over all latents, by quantity.
        t: the noise level.
    """
    row: Row = {}
    # The score is (mean − z)/t², so its squared errors are those of the mean divided by t⁴.
    for prefix, scale in (("mu", 1.0), ("score", t**-4)):
        for error in ERRORS:
            column = f"{prefix}_{error}"
            row[column] = row[f"{column}_se"] = ""
            if error in means:
                row[column] = means[error].mean * scale
                row[f"{column}_se"] = means[error].standard_error * scale

    row["bias_share"] = row["bias_share_se"] = ""
    if "variance" in means and means["mse"].mean > 0:
        share = bias_share(means["mse"], means["bias_sq_corrected"], means["variance"])
        row["bias_share"], row["bias_share_se"] = share

    for quantity, column in COLUMNS.items():
        row[column] = means[quantity].mean if quantity in means else ""
    return row
