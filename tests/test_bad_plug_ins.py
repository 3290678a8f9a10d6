"""Plug-ins and arguments that break their contract: each is refused with a message that names it."""

import pytest
import torch

from lit_knn.data import ReferenceDataModule
from lit_knn.errors import InputError
from lit_knn.estimators import Estimator, Exact
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import EDM, Process, forward_noise, pf_ode_velocity


@pytest.mark.parametrize("loaded", [None, torch.zeros(3, 1), (torch.zeros(3, 1),), ([1.0], None)])
def test_a_load_that_gives_no_pair_of_images_and_labels_is_refused(loaded):
    class Data(ReferenceDataModule):
        def load(self):
            return loaded

    with pytest.raises(InputError, match=r"Data\.load must return \(images, labels\)"):
        Data().setup()


@pytest.mark.parametrize("t", ["2", None, 1 + 2j, torch.ones(4, 2)])
def test_a_time_that_is_no_number_per_item_is_refused(t):
    exact = Exact().bind(ReferenceSet(torch.randn(8, 2)))
    with pytest.raises(InputError, match="t must be"):
        exact.posterior_mean(torch.zeros(4, 2), t)


def test_an_estimate_that_is_not_finite_is_the_fault_of_the_estimator():
    class Broken(Estimator):
        needs_reference = False

        def _posterior_mean(self, z, t, x_source, generator):
            return z / 0

    with pytest.raises(InputError, match="Broken: the estimate of the posterior mean is not finite"):
        Broken().posterior_mean(torch.zeros(1, 2), 1.0)


def test_a_process_may_give_a_constant_as_a_number():
    class Plain(Process):
        def sigma(self, t):
            return t

        def scale(self, t):
            return 1.0

    x, t, noise = torch.ones(3, 2, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0]), torch.randn(3, 2).double()
    assert torch.equal(forward_noise(x, t, noise, Plain()), forward_noise(x, t, noise, EDM()))
    mu = torch.zeros_like(x)
    assert torch.equal(pf_ode_velocity(x, t.double(), mu, Plain()), pf_ode_velocity(x, t.double(), mu, EDM()))


def test_a_process_that_returns_another_shape_is_refused():
    class Wrong(EDM):
        def scale(self, t):
            return torch.ones(7)

    with pytest.raises(InputError, match=r"Wrong\.scale must return a tensor of the shape of t"):
        forward_noise(torch.ones(2, 2), 0.5, torch.zeros(2, 2), Wrong())
