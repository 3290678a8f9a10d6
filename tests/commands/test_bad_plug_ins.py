"""Plug-ins and arguments that break their contract: each is refused with a message that names it."""

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.data import ReferenceDataModule
from lit_knn.estimators import Estimator


@pytest.mark.parametrize("loaded", [None, torch.zeros(3, 1), (torch.zeros(3, 1),), ([1.0], None)])
def test_a_load_that_gives_no_pair_of_images_and_labels_is_refused(loaded):
    class Data(ReferenceDataModule):
        def load(self):
            return loaded

    with pytest.raises(InputError, match=r"Data\.load must return \(images, labels\)"):
        Data().setup()


def test_an_estimate_that_is_not_finite_is_the_fault_of_the_estimator():
    class Broken(Estimator):
        needs_reference = False

        def _posterior_mean(self, z, t, x_source, generator):
            return z / 0

    with pytest.raises(InputError, match="Broken: the estimate of the posterior mean is not finite"):
        Broken().posterior_mean(torch.zeros(1, 2), 1.0)


def test_an_estimator_that_runs_out_of_something_is_an_error_and_not_the_end_of_the_data():
    class Empty(Estimator):
        needs_reference = False

        def _posterior_mean(self, z, t, x_source, generator):
            return next(iter(()))

    with pytest.raises(RuntimeError, match="Empty raised StopIteration"):
        Empty().posterior_mean(torch.zeros(1, 2), 1.0)
