import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, OneSample
from lit_knn.index import FaissIndex
from lit_knn.metrics import probe
from lit_knn.metrics.latents import NoisyLatents
from lit_knn.reference import ReferenceSet
from tests.toys import low_rank_vectors


def posterior(x, z, t):
    """Probabilities of x (N, d) at z (d,), in NumPy."""
    log_p = -((z - x) ** 2).sum(1) / (2 * t**2)
    p = np.exp(log_p - log_p.max())
    return p / p.sum()


@pytest.mark.parametrize("by_class", [False, True])
def test_a_level_is_what_enumeration_says(by_class, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"Exact": Exact, "OneSample": OneSample})
    images, labels, t = low_rank_vectors(80), torch.arange(80) % 2, 0.6
    images[labels == 1] += 3
    sets = [ReferenceSet(images[rows], labels=labels[rows]) for rows in (slice(60), slice(60, 80))]
    drawn = [NoisyLatents(own, 40, 0) for own in sets]
    table = probe.measure(drawn, by_class, [t, 1e4], tmp_path)
    low = {name: values[0] for name, values in table.items()}
    for latents, loss, linear in ((drawn[0], None, "wiener"), (drawn[1], "held_out", "wiener_held_out")):
        z, x = (values.double().numpy() for values in latents.batch(range(len(latents.ids)), t))
        classes = latents.reference.labels[latents.ids]
        # By class, a level lists its latents in the order of their classes.
        for place, i in enumerate(classes.argsort(stable=True) if by_class else range(len(z))):
            own = sets[0].images[sets[0].labels == classes[i] if by_class else slice(None)].double().numpy()
            p, m, covariance = posterior(own, z[i], t), own.mean(0), np.cov(own.T, bias=True)
            filtered = m + np.linalg.solve(covariance + t**2 * np.eye(12), covariance) @ (z[i] - m)
            assert low[linear][place] == pytest.approx(((filtered - x[i]) ** 2).mean(), rel=1e-3)  # float32 components
            # float32 images and latents, of size about 5, differ from float64 only in sums of 60 terms.
            if loss:
                assert low[loss][place] == pytest.approx(((x[i] - p @ own) ** 2).mean(), rel=1e-6)
                continue
            assert low["irreducible"][place] == pytest.approx(p @ ((own - p @ own) ** 2).mean(1), rel=1e-6)
            assert low["images"][place] == pytest.approx(np.exp(-(p * np.log(p + 1e-300)).sum()), rel=1e-6)
            assert low["collapsed"][place] == (p.max() > 0.99)
            for level in table["variance"][0], table["irreducible"][1]:  # At t = 1e4 the posterior is uniform.
                assert level[place] == pytest.approx(np.trace(covariance) / 12, rel=1e-3)
    assert 0 < low["collapsed"].mean() < 1
    assert low["Exact"].max() < 1e-9  # It errs only by the rounding of float32.


def test_one_sample_has_the_variance_of_two_points_in_closed_form(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"OneSample": OneSample})
    # With x = ±a the variance at z is a²(1 − tanh²(a z / t²)), and z is ±a + t ε: an integral over ε.
    a, t = 0.8, 0.7
    epsilon, weights = np.polynomial.hermite_e.hermegauss(80)
    expected = (a**2 / np.cosh(a * (a + t * epsilon) / t**2) ** 2 * weights).sum() / weights.sum()
    latents = NoisyLatents(ReferenceSet(torch.tensor([[a], [-a]]).repeat(1000, 1)), 2000, 0)
    level = probe.measure([latents], False, [t], tmp_path)
    for name in ("irreducible", "OneSample"):  # The source is drawn from the posterior.
        assert abs(level[name].mean() - expected) < 4 * level[name].std() / 2000**0.5


def test_a_tenth_of_the_images_collapses_as_a_set_of_a_tenth_does(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {})
    # Half of the images are nearly their own mirror images, which are among any tenth with them.
    x, t, tenth = low_rank_vectors(400), 0.4, []
    x[::2] += 0.98 * x[::2].flip(1)
    latents = NoisyLatents(ReferenceSet(x.reshape(400, 1, 1, 12), hflip=True), 800, 0)
    level = probe.measure([latents], False, [t], tmp_path)
    z = latents.batch(range(800), t)[0].flatten(1).numpy()
    for i, source in enumerate(latents.ids % 400):
        own = x.numpy()[[*{*range(0, 400, 10), source.item()}]]
        tenth.append(posterior(np.concatenate([own, own[:, ::-1]]), z[i], t).max() > 0.99)
    # Here the source of z itself is among the tenth, there a draw from the posterior, which is as likely the source.
    assert abs(level["collapsed_tenth"].mean() - np.mean(tenth)) < 4 * (2 * np.var(tenth) / 800) ** 0.5
    assert level["collapsed_tenth"].mean() > level["collapsed"].mean() + 0.2


def test_a_level_is_kept_for_equal_data_and_settings_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TARGETS", {"OneSample": OneSample})
    measured, measure_level = [], probe.measure_level
    monkeypatch.setattr(probe, "measure_level", lambda *args: measured.append(len(args[2])) or measure_level(*args))
    images = low_rank_vectors(60)

    def levels(by_class=False, classes=2, index=None, num=10, seed=0, t=(0.5, 1.0), held_out=10):
        """The number of levels that are measured anew, with both estimators."""
        parts = images.split([60 - held_out, held_out])
        sets = [ReferenceSet(x, index, labels=torch.arange(len(x)) % classes) for x in parts]
        before = measured.count(2)
        probe.measure([NoisyLatents(own, num, seed) for own in sets], by_class, t, tmp_path)
        return measured.count(2) - before

    assert [levels(), levels(), levels(classes=3)] == [2, 0, 0]
    assert [levels(by_class=True), levels(by_class=True), levels(by_class=True, classes=3)] == [2, 0, 2]
    for change in ({"index": FaissIndex("SQ8")}, {"num": 9}, {"seed": 1}, {"t": (0.5, 2.0)}, {"held_out": 20}):
        assert levels(**change) == 2


@pytest.mark.parametrize(
    ("images", "classes", "rule"),
    [
        (torch.full((9, 4), 0.3), 0, "the images do not differ"),
        (torch.arange(3.0).repeat(3).unsqueeze(1), 3, "images of each class do not differ"),
        (torch.randn(9, 4), 2, "all images of class 2 are held out"),
    ],
)
def test_data_without_an_answer_is_refused(images, classes, rule, tmp_path):
    sets = (
        ReferenceSet(images, labels=torch.arange(9) % (classes or 1)),
        ReferenceSet(images[:1], labels=torch.tensor([2])),
    )
    with pytest.raises(InputError, match=rule):
        probe.measure([NoisyLatents(own, 9, 0) for own in sets], classes > 0, [0.5], tmp_path)
