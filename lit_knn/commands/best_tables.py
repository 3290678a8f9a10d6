"""The tables of `lit-knn best`: one of checkpoints or averages, and one of further draws of the best."""

import json
from pathlib import Path
from typing import Literal

from lit_knn.callbacks import Fidelity
from lit_knn.common.settings import describe
from lit_knn.common.tables import AVERAGES_PREFIX, CHECKPOINTS_PREFIX, DRAWS_PREFIX
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.runs.run import data_autoencoder

Settings = dict[str, object]  # plain values, as in a JSON file
Key = Literal["images_seen", "ema"]
"""The column that numbers the checkpoints: images seen, or the relative length of an average."""


def settings_of(
    fidelity: Fidelity, reference: ReferenceSet, pl_module: EstimatorTraining
) -> Settings:
    """Return all that a measured distance depends on. All ranks call this: they describe the data together.

    Args:
        fidelity: measures the samples.
        reference: the real images.
        pl_module: makes the samples.
    """
    measure = fidelity.measure
    settings: Settings = {
        "num_samples": fidelity.num_samples,
        "extractor": measure.extractor.fingerprint(),
        "extra_metrics": list(measure.extra_metrics),
        "mirrored": measure.mirrored,
        "data": reference.fingerprint(measure.mirrored),
    }
    if "kid" in measure.extra_metrics:
        settings["kid_subset_size"] = measure.kid_subset_size

    autoencoder = data_autoencoder(pl_module.trainer)
    if autoencoder is not None:
        settings["autoencoder"] = describe(autoencoder)

    for name, value in pl_module.generative_model().options().items():
        settings[f"model.{name}"] = value
    # Settings read from a file have these types.
    return json.loads(json.dumps(settings, default=str))


def open_tables(
    run: Path, averages: str | None, key: Key, fidelity: Fidelity, settings: Settings
) -> tuple[KeptResults, KeptResults]:
    """Open the table of checkpoints and that of further draws.

    Args:
        run: folder of the training run, for tables of checkpoints.
        averages: folder of the averages, for tables of averages.
        key: the column that numbers the checkpoints.
        fidelity: names the columns of distances.
        settings: all that a distance depends on.
    """
    columns: dict[str, type] = {"step": int, "images_seen": int}
    folder, prefix = run, CHECKPOINTS_PREFIX
    if key == "ema":
        columns["ema"] = float
        folder, prefix = Path(str(averages)), AVERAGES_PREFIX

    columns["checkpoint"] = str
    columns |= dict.fromkeys(fidelity.measure.names, float)
    columns |= {"num_samples": int, "seconds": float}

    metric = fidelity.measure.metric
    of_all = {(): settings}
    kept = KeptResults(folder / f"{prefix}{metric}.csv", columns, (key,), of_all)
    columns = columns | {"draw": int}
    drawn = KeptResults(folder / f"{DRAWS_PREFIX}{metric}.csv", columns, (key, "draw"), of_all)
    return kept, drawn
