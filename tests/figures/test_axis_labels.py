"""Every axis with numbers has a label, in every figure of the library."""

import pytest
import torch

from lit_knn.estimators import KNN
from lit_knn.figures import (
    agreement_curves,
    average_curve,
    checkpoint_curve,
    figure1,
    figure3,
    figure4,
    figure5,
    same_noise_boxes,
    size_calibration,
)
from lit_knn.figures.figure3 import PREFIXES, QUANTITIES
from lit_knn.figures.training_curves import TrainingCurve, run_comparison
from lit_knn.reference import ReferenceSet


def of_figure1():
    reference = ReferenceSet(torch.tensor([[0.0], [1.0], [2.0]]))
    return figure1(KNN(k=2, n=1).bind(reference), reference, 0.0, [0.5, 1.0])


def of_figure4():
    fid = {"fid": [(1_000_000, 5.0), (2_000_000, 4.0)]}
    return figure4([TrainingCurve("a", "KNN", 64, 8, fid), TrainingCurve("b", "OneSample", distances=fid)])


def of_figure5():
    return figure5([{"method": "KNN", "t_switch": t, "fid": 2.0, "copied_fraction": 0.5} for t in (1, 2)], "fid", "KNN")


def of_agreement_curves():
    measures = {f"{name}{part}": 0.5 for name in ("r2", "mse") for part in ("", "_se", "_low", "_high")}
    return agreement_curves([{"images": "training", "estimator": "KNN", "t": t, **measures} for t in (1.0, 2.0)])


def of_same_noise_boxes():
    samples = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    return same_noise_boxes({"KNN": samples}, {"net": samples + 0.1})


def of_size_calibration():
    rows = [{"t": t, "size": size, "mse": 0.1 * size} for t in (1.0, 2.0) for size in (3, 5)]
    return size_calibration(rows, {"chosen": {1.0: 3, 2.0: 5}})


def of_run_comparison():
    return run_comparison(
        [TrainingCurve("a", "STF", distances={"fid": [(1000, 5.0), (2000, 4.0)]}, ms_per_image=(1.0, 2.0))]
    )


def of_checkpoints():
    return checkpoint_curve([(1000, 5.0), (2000, 4.0)], (2000, 4.0), "fid", "run")


def of_averages():
    return average_curve([(0.05, 5.0), (0.1, 4.0)], (0.1, 4.0), "fid", "run")


def of_figure3():
    columns = [f"{prefix}_{quantity}{part}" for prefix in PREFIXES for quantity in QUANTITIES for part in ("", "_se")]
    return figure3([{"estimator": "KNN", "t": t, **dict.fromkeys(columns, 1e-3)} for t in (1.0, 2.0)])


MADE = [value for name, value in list(globals().items()) if name.startswith("of_")]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_every_axis_with_numbers_has_a_label(make):
    figure = make()
    figure.draw_without_rendering()
    assert figure.axes
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            # Of panels that share an axis, only the outer one has numbers.
            numbered = any(tick.label1.get_visible() and tick.label1.get_text() for tick in axis.get_major_ticks())
            assert axis.get_label_text() or not numbered, (axes.get_title(), axis.axis_name)
