"""The measurement of a probe against enumeration in float64, and the levels that it keeps."""

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.index import FaissIndex
from lit_knn.metrics import probe
from lit_knn.metrics.edm_constants import edm_constants, sentences
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors

pytestmark = pytest.mark.filterwarnings("ignore:.*going on")


@pytest.mark.parametrize("by_class", [False, True])
def test_a_level_is_what_enumeration_says(by_class, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"Exact": Exact, "OneSample": OneSample})
    images, labels, t = low_rank_vectors(80), torch.arange(80) % 2, 0.6
    images[labels == 1] += 3
    sets = [ReferenceSet(images[rows], labels=labels[rows]) for rows in (slice(60), slice(60, 80))]
    drawn = [NoisyLatents(own, 60, 0) for own in sets]
    table = probe.measure_levels(drawn, by_class, [t, 1e4], tmp_path)
    low, tenth = {name: values[0] for name, values in table.items()}, []
    for latents, loss, linear in (
        (drawn[0], None, "wiener"),
        (drawn[1], "held_out", "wiener_held_out"),
    ):
        z, x = (values.double().numpy() for values in latents.batch(range(len(latents.ids)), t))
        classes = latents.reference.labels[latents.ids]
        # By class, a level lists its latents in the order of their classes.
        for place, i in enumerate(classes.argsort(stable=True) if by_class else range(len(z))):
            own = (
                sets[0]
                .images[sets[0].labels == classes[i] if by_class else slice(None)]
                .double()
                .numpy()
            )
            p, m, covariance = posterior(own, z[i], t), own.mean(0), np.cov(own.T, bias=True)
            filtered = m + np.linalg.solve(covariance + t**2 * np.eye(12), covariance) @ (z[i] - m)
            # float32 components
            assert low[linear][place] == pytest.approx(((filtered - x[i]) ** 2).mean(), rel=1e-3)
            # float32 images and latents, of size about 5, differ from float64 only in sums of 60 terms.
            if loss:
                assert low[loss][place] == pytest.approx(((x[i] - p @ own) ** 2).mean(), rel=1e-6)
                continue
            assert low["irreducible"][place] == pytest.approx(
                p @ ((own - p @ own) ** 2).mean(1), rel=1e-6
            )
            assert low["images"][place] == pytest.approx(
                np.exp(-(p * np.log(p + 1e-300)).sum()), rel=1e-6
            )
            assert low["collapsed"][place] == (p.max() > 0.99)
            few = [
                p * ((np.arange(len(p)) % 10 == 0) | (np.arange(len(p)) == j))
                for j in range(len(p))
            ]
            tenth.append(sum(p[j] for j, rest in enumerate(few) if rest.max() > 0.99 * rest.sum()))
            # At t = 1e4 the posterior is uniform.
            for level in table["variance"][0], table["irreducible"][1]:
                assert level[place] == pytest.approx(np.trace(covariance) / 12, rel=1e-3)
    # A tenth has the drawn source, too, so its collapse has a probability.
    deviation = sum(share * (1 - share) for share in tenth) ** 0.5
    assert low["collapsed_tenth"].sum() == pytest.approx(sum(tenth), abs=4 * deviation)
    assert low["Exact"].max() < 1e-9  # It errs only by the rounding of float32.
    # One sample has the variance of the posterior on average, because its source is drawn from there.
    more = low["OneSample"] - low["irreducible"]
    assert 0 < more.mean().abs() < 4 * more.std() / 60**0.5


def test_the_variance_is_that_of_the_data_at_low_levels_too(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"OneSample": OneSample})
    images = low_rank_vectors(60)
    table = probe.measure_levels(
        [NoisyLatents(ReferenceSet(images), 10, 0)], False, [0.01, 0.02], tmp_path
    )
    variance = images.double().var(0, correction=0).mean().item()
    assert table["variance"].flatten().tolist() == pytest.approx([variance] * 20, rel=1e-5)


def posterior(x, z, t):
    """Probabilities of x (N, d) at z (d,), in NumPy."""
    log_p = -((z - x) ** 2).sum(1) / (2 * t**2)
    p = np.exp(log_p - log_p.max())
    return p / p.sum()


def test_a_level_is_kept_for_equal_data_and_settings_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"OneSample": OneSample})
    measured, measure_sets = [], probe.measure_sets

    def measure(*args, number, t):
        measured.append(t)
        return measure_sets(*args, number=number, t=t)

    monkeypatch.setattr(probe, "measure_sets", measure)

    def levels(by_class=False, classes=2, index=None, num=10, seed=0, t=(0.5, 1.0), held_out=10):
        """The number of levels that are measured anew."""
        parts = low_rank_vectors(60).split([60 - held_out, held_out])
        sets = [ReferenceSet(x, index, labels=torch.arange(len(x)) % classes) for x in parts]
        measured.clear()
        probe.measure_levels([NoisyLatents(own, num, seed) for own in sets], by_class, t, tmp_path)
        return len(measured)

    assert [levels(), levels(), levels(classes=3)] == [2, 0, 0]
    assert [levels(by_class=True), levels(by_class=True), levels(by_class=True, classes=3)] == [
        2,
        0,
        2,
    ]
    for change in (
        {"index": FaissIndex("SQ8")},
        {"num": 9},
        {"seed": 1},
        {"t": (0.5, 2.0)},
        {"held_out": 20},
    ):
        assert levels(**change) == 2


def test_data_without_an_answer_is_refused(tmp_path):
    for images, classes, rule in (
        (torch.full((9, 4), 0.3), 0, "the images do not differ"),
        (torch.arange(3.0).repeat(3).unsqueeze(1), 3, "images of each class do not differ"),
        (torch.randn(9, 4), 2, "all images of class 2 are held out"),
    ):
        sets = [
            ReferenceSet(images, labels=torch.arange(9) % max(classes, 1)),
            ReferenceSet(images, labels=9 * [2]),
        ]
        with pytest.raises(InputError, match=rule):
            probe.measure_levels(
                [NoisyLatents(own, 9, 0) for own in sets], classes > 0, [0.5], tmp_path
            )


def test_constants_are_those_of_all_pairs_and_values():
    images = low_rank_vectors(50)
    pairs = torch.cdist(images.double(), images.double())
    largest, nearest = pairs.max().item(), pairs.fill_diagonal_(torch.inf).amin(1).median().item()
    constants = edm_constants(NoisyLatents(ReferenceSet(images), 50, 0))
    values, lines = [value for value, _ in constants.values()], sentences(constants)
    sigma = images.double().std(correction=0).item()
    assert values == pytest.approx([sigma, 0.004 * sigma, largest], rel=1e-3)  # Four digits.
    assert f"the nearest image is {nearest:.3g} away (median)" in lines[2]
    assert ["does not fit" in line for line in lines] == [False, True, True, True]
