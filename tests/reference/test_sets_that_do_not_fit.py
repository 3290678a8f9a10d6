"""A set that does not fit into the memory is refused in one line, before its images are read."""

import numpy as np
import pytest

from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.commands.plan import check_fits
from lit_knn.common.errors import InputError
from lit_knn.common.memory import machine_bytes
from tests import ROOT
from tests.command_lines import DEMO, refusal_of

CONFIGS = ROOT / "configs"
CONDITIONAL = str(CONFIGS / "table2" / "digits_conditional.yaml")
D = 64


def sparse_images(folder, share):
    """An .npy file of uint8 images of 8x8 pixels that claims this share of the machine's memory, and takes no room."""
    path, N = folder / "big.npy", int(share * machine_bytes() / D)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (N, 1, 8, 8)}
        )
        file.truncate(file.tell() + N * D)
    return path


def run_of(run, path, estimator, *options):
    chosen = ["--model.estimator", str(CONFIGS / "estimators" / f"{estimator}.yaml")]
    return [
        "-c",
        run,
        "--trainer.accelerator",
        "cpu",
        "--data",
        "Arrays",
        "--data.path",
        str(path),
        *chosen,
        *options,
    ]


def checked(run, path, estimator, *options):
    """Check that a run fits."""
    cli = make_cli(run_of(run, path, estimator, *options), run=False)
    check_fits(cli.trainer, cli.model, cli.datamodule)
    return cli


def test_every_command_refuses_images_larger_than_the_memory(tmp_path, own_folder, capsys):
    path = sparse_images(tmp_path, 1.5)
    size, there = (
        f"images {1.5 * machine_bytes() / 1e9:.4g} GB",
        f"more than the {machine_bytes() / 1e9:.4g} GB",
    )
    for run, name in ((DEMO, "Exact"), (CONDITIONAL, "Exact")):
        line = refusal_of(["fit", *run_of(run, path, "exact")], capsys)
        assert f"{name}: the set does not fit: {size}" in line
        assert there in line
    data = ["--data", "Arrays", "--data.path", str(path), "--trainer.accelerator", "cpu"]
    figure = str(CONFIGS / "figure3" / "digits.yaml")
    assert "KNN, STF, MonteCarlo: the set does not fit" in refusal_of(
        ["validate", "-c", figure, *data], capsys
    )
    sampling = ["predict", "--model", "LitEstimator", "--model.estimator", "Exact", *data]
    assert "Exact: the set does not fit" in refusal_of(sampling, capsys)
    assert list(tmp_path.iterdir()) == [path]


def test_index_that_does_not_fit_is_refused_though_images_fit(tmp_path):
    path = sparse_images(tmp_path, 0.4)
    checked(DEMO, path, "exact")
    for estimator, name in (("knn", "KNN"), ("switched", "KNN")):
        with pytest.raises(
            InputError, match=f"{name}: the set does not fit: images .* GB, index .* GB"
        ):
            checked(DEMO, path, estimator, "--data.index", "FaissIndex")
    # The images of classes are copies.
    checked(CONDITIONAL, sparse_images(tmp_path, 0.6), "one_sample")
    with pytest.raises(InputError, match="images copied by class"):
        checked(CONDITIONAL, path, "exact")


def test_a_run_that_may_fit_is_tried(tmp_path):
    # Images that leave no room for work arrays: the plan says so, and the run is tried.
    cli = checked(DEMO, sparse_images(tmp_path, 0.999), "stf")
    with pytest.raises(SystemExit):
        cli.trainer.plan(cli.model, cli.datamodule, one_step=False)
    check_fits(cli.trainer, cli.model, None)  # A set whose size is not known is tried, too.
