"""The tables of `lit-knn best`: one of checkpoints or averages, and one of further sets of samples of the best."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lit_knn.callbacks import Fidelity
from lit_knn.common.errors import InputError
from lit_knn.common.settings import describe
from lit_knn.common.tables import AVERAGES_PREFIX, CHECKPOINTS_PREFIX, DRAWS_PREFIX
from lit_knn.metrics.kept_results import KeptResults
from lit_knn.modules.base import EstimatorTraining
from lit_knn.reference import ReferenceSet
from lit_knn.runs.checkpoints import read_training
from lit_knn.runs.folder import RunFolder
from lit_knn.runs.kept_files import averages_in, kept_checkpoints
from lit_knn.runs.run import data_autoencoder

Settings = dict[str, object]  # plain values, as in a JSON file
Key = Literal["images_seen", "ema"]
"""The column that numbers the checkpoints: images seen, or the relative length of an average."""


def settings_of(
    fidelity: Fidelity, reference: ReferenceSet, pl_module: EstimatorTraining
) -> Settings:
    """Return everything that a measured distance depends on, as plain values.

    All ranks must call this, because each rank hashes its share of sharded data.

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
    # The settings are compared with those in a JSON file, which has lists for tuples and text for other objects.
    return json.loads(json.dumps(settings, default=str))


def open_tables(
    run: Path, averages: str | None, key: Key, fidelity: Fidelity, settings: Settings
) -> tuple[KeptResults, KeptResults]:
    """Return the table of checkpoints or averages, and the table of further sets of samples of the best one.

    Args:
        run: folder of the training run; it has the tables of checkpoints.
        averages: folder of the averages; it has the tables of averages.
        key: the column that numbers the checkpoints.
        fidelity: has the names of the columns of distances.
        settings: everything that a distance depends on, from `settings_of`.
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
    checkpoints = KeptResults(folder / f"{prefix}{metric}.csv", columns, (key,), of_all)
    columns = columns | {"draw": int}
    draws = KeptResults(folder / f"{DRAWS_PREFIX}{metric}.csv", columns, (key, "draw"), of_all)
    return checkpoints, draws


def find_checkpoints(
    run: Path, folder: str | None, max_steps: int
) -> tuple[dict[float, Path], Key]:
    """Return the checkpoints to measure, and the column that numbers them.

    Args:
        run: folder of the training run.
        folder: folder of the checkpoints, if it is not that of the run.
        max_steps: the steps of a complete training.

    Returns:
        The checkpoints by images seen, or the averages by relative length, and the name of that
        column.
    """
    if folder is not None:
        averages = averages_in(folder)
        if averages:
            return averages, "ema"

    checkpoints = kept_checkpoints(RunFolder(run), folder, max_steps)
    return dict(checkpoints.items()), "images_seen"


def check_averages(table: KeptResults, averages: Mapping[float, Path]) -> None:
    """Raise InputError if the table has a row of an earlier average of the same length but other images seen."""
    for length, path in averages.items():
        row = table.find(length)
        if row is None:
            continue

        seen = read_training(path)["images_seen"]
        if row["images_seen"] != seen:
            its_row = f"its row in {table.path} of {row['images_seen']}"
            problem = f"{path} is of {seen} images, and {its_row}"
            raise InputError(f"{problem}: move that table away")
