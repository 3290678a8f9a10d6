"""The sentences of a probe follow from its curves, also where there is nothing to say."""

import math

import numpy as np
import pytest
import torch

from lit_knn.metrics.probe_advice import advice_on_few_images, removed
from lit_knn.metrics.probe_shares import Remainder, Training
from lit_knn.metrics.probe_verdict import conclude

T = 2.0 ** np.arange(-6, 7)
ESTIMATORS = ("STF", "KNN", "SubspaceKNN", "Exact")


def table_of(curves):
    """Columns of a probe with 64 latents, which are all alike."""
    curves = {"collapsed_tenth": curves["collapsed"], "variance": 1.02 + 0 * T} | curves
    for name in ESTIMATORS:
        curves.setdefault(f"{name}_ms", 1 + 0 * T)
    latents = np.ones((64, 1))
    return {name: torch.tensor(curve * latents).T.double() for name, curve in curves.items()}


def text_of(table, sigma, weight=None, pass_ms=6.0):
    weight = np.ones(len(sigma)) if weight is None else weight
    lines, best = conclude(T, table, Training("a run", sigma, weight, pass_ms))
    text = " ".join(lines)
    for nonsense in ("<", ">", "nan", "inf", "100.00%"):
        assert nonsense not in text
    return text, best


def curves(noise):
    """STF leaves 0.04/t of the noise, KNN a fifth, SubspaceKNN 0.005, and Exact nothing."""
    shares = {"STF": np.minimum(1, 0.04 / T), "KNN": 0.2, "SubspaceKNN": 0.005, "Exact": 0}
    return {"irreducible": noise} | {name: noise * share for name, share in shares.items()}


def test_sentences_follow_from_the_curves():
    # The noise is 1 from t = 1/8 and 1.02 from t = 32 on.
    noise = 1.0 * (T > 1 / 9) + 0.02 * (T > 31)
    collapse = {"collapsed": T < 1 / 9, "collapsed_tenth": T < 1 / 5}
    times = {"SubspaceKNN_ms": 1 + 2 * (noise > 0), "Exact_ms": 4 + 0 * T}
    table = table_of(curves(noise) | collapse | times)
    # Half of the latents have 0 of KNN's error, and half twice of it.
    table["KNN"] *= torch.tensor([0.0, 2.0] * 32)
    # The weight of t = 16 is 2, so half of the noise is there, and half at t = 1.
    sigma = np.repeat([1.0, 16.0, 1 / 64, 1 / 100], [500, 250, 225, 25])
    text, best = text_of(table, sigma, np.where(sigma > 10, 2.0, 1.0))
    # Between 1/16 and 1/8 the collapse falls from 1 to 0. Between 16 and 32 the rest of the variance
    # falls from 0.0196 to 0. Three quarters of the levels cost SubspaceKNN 3 ms.
    for said in (
        f"Collapse: up to noise level {2**-3.99:.3g} at least 99 % of",
        "75.0% of the noise levels of a run are above it.",
        f"With a tenth of the images the collapse is at level {2**-2.99:.3g}.",
        f"pay from level {2**-3.99:.3g} to level 4; above it STF leaves less than 1 %",
        "50.0% of the target noise of a run is between",
        "Above level 22.5 the best denoiser is the mean image.",
        "2.5% of the noise levels of a run are outside",
        f"STF removes {1 - (0.04 + 0.04 / 16) / 2:.2%} ± ",
        f"KNN removes 80.00% ± {math.ceil(2000 / 63**0.5) / 1e4:.2%} of the target noise of a run",
        "SubspaceKNN removes 99.50% ± ",
        "it costs 2.5 ms an image, 42% of a pass of the network",
        "Exact removes more than 99.99% of the target noise of a run; it costs 4 ms",
        "less than 1 % of the noise of one sample is SubspaceKNN: 2.5 ms an image, beside 6 ms of",
    ):
        assert said in text
    assert "Nothing to gain" not in text
    assert best == "SubspaceKNN"


def test_levels_where_targets_pay_begin_at_the_collapse():
    # There is noise below the collapse, too: a quarter of it.
    table = table_of(curves(1 + 0 * T) | {"collapsed": T < 1 / 9})
    sigma = np.repeat([1 / 64, 1.0], [250, 750])
    text, _ = text_of(table, sigma)
    assert "to level 4; above it STF leaves less than 1 %" in text
    assert "75.0% of the target noise of a run is between these levels." in text

    # At t = 4 too few latents carry the noise: the levels beside it, 2 and 8, have 0.02 and 0.005.
    table["irreducible"][T == 4, 10:] = 0
    text, _ = text_of(table, sigma)
    assert f"to level {2 * 4 ** (2 / 3):.3g}; above it STF leaves less than 1 %" in text


def test_levels_are_counted_and_noise_is_weighted():
    table = table_of(curves(1 + 0 * T) | {"collapsed": T < 1 / 9})
    # 3 % of the levels are below those measured, and 7 % above.
    sigma = np.repeat([1.0, 16.0, 1 / 100, 100.0], [500, 400, 30, 70])
    text, _ = text_of(table, sigma, np.where(sigma > 10, 2.0, 1.0))
    assert "10.0% of the noise levels of a run are outside those measured" in text
    # The noise at t = 1 is 500 of 500 + 2 · 400 + 30 + 2 · 70.
    assert f"{500 / 1470:.1%} of the target noise of a run is between these levels." in text


def test_a_training_below_the_collapse_has_nothing_to_gain():
    table = table_of(curves(1.0 * (T > 1 / 9)) | {"collapsed": T < 1 / 9})
    for above, nothing in ((9, True), (11, False)):
        text, best = text_of(table, np.repeat([1 / 60, 1], [1000 - above, above]))
        assert ("Nothing to gain: fewer than 1 % of the noise levels of a run" in text) == nothing
        assert best == ("OneSample" if nothing else "SubspaceKNN")


def test_better_targets_pay_from_lowest_level_if_no_collapse():
    table = table_of(curves(1 + 0 * T) | {"collapsed": 0.3 + 0 * T, "collapsed_tenth": 0.4 + 0 * T})
    text, _ = text_of(table, np.ones(9), pass_ms=None)
    for said in (
        "Nothing collapses: at noise level 0.0156, the lowest measured, 30.0% of the posteriors",
        "With a tenth of the images nothing collapses.",
        "Targets better than STF's pay from level 0.0156, the lowest measured, to level 4;",
        "STF removes 96.00% ± ",
        "of the target noise of a run; it costs 1 ms an image. KNN",
        "is SubspaceKNN: 1 ms an image.",
    ):
        assert said in text
    assert "pass of the network" not in text

    # STF averages all images of a small set.
    table["STF"] = 1e-3 * table["irreducible"]
    text, best = text_of(table, np.ones(9))
    assert "STF leaves less than 1 % of the noise of one sample wherever there is noise." in text
    assert (best, "better than STF's" in text) == ("STF", False)

    # STF is nearly useless at all levels.
    table["STF"] = 0.9 * table["irreducible"]
    text, _ = text_of(table, np.ones(9))
    assert "from level 0.0156, the lowest measured, to level 64, the highest measured." in text


def test_where_all_levels_are_collapsed_no_share_is_told():
    table = table_of(curves(0 * T) | {"collapsed": 1 + 0 * T, "collapsed_tenth": 1 + 0 * T})
    text, best = text_of(table, np.ones(9))
    for said in (
        "Everything collapses: up to noise level 64, the highest measured, at least 99 % of the",
        "With a tenth of the images everything collapses.",
        "STF costs 1 ms an image, 17% of a pass of the network; how much noise it removes cannot be",
        "Up to level 64, the highest measured, the best denoiser is not yet the mean image.",
        "Nothing to gain",
    ):
        assert said in text
    assert best == "OneSample"

    # In one of a hundred posteriors STF leaves half of the noise: no level has little of it.
    noisy = table_of(curves(1 + 0 * T) | {"collapsed": 0.995 + 0 * T})
    noisy["STF"] = 0.5 * noisy["irreducible"]
    text, _ = text_of(noisy, np.ones(9))
    assert "Everything collapses" in text
    assert "STF leaves less" not in text
    assert "better than STF" not in text

    # Nobody knows what is above the levels measured.
    text, best = text_of(table, np.repeat([1.0, 65.0], [980, 20]))
    assert "2.0% of the noise levels of a run are above those measured" in text
    assert ("--t_max" in text, "Nothing to gain" in text, best) == (True, False, None)


def test_too_few_latents_give_no_advice_but_more_latents():
    table = table_of(curves(1 + 0 * T) | {"collapsed": 0 * T})
    for name in ("irreducible", *ESTIMATORS):
        table[name][:, 10:] = 0
    text, best = text_of(table, np.ones(9))
    assert "Fewer than 20 latents carry the target noise of a run" in text
    assert "--latents" in text
    assert ("KNN costs 1 ms" in text, best) == (True, None)


def test_estimators_that_are_worse_than_one_sample_say_so():
    table = table_of(curves(1 + 0 * T) | {"collapsed": 0 * T, "variance": 1 + 0 * T})
    table["KNN"] = 1.5 * table["irreducible"]
    for name in ("SubspaceKNN", "Exact"):
        table[name] = 0.3 * table["irreducible"]
    text, best = text_of(table, np.ones(9))
    assert "KNN errs more than one sample: 1.50 times the target noise of a run; it costs" in text
    assert "None of these estimators leaves less than 1 %" in text
    assert "At all noise levels measured the best denoiser is the mean image." in text
    assert best is None


@pytest.mark.parametrize(
    ("share", "error", "said"),
    [
        (0.0083, 0.00012, "99.17% ± 0.02%"),
        (2e-5, 1e-5, "more than 99.99%"),
        (2e-5, 5e-5, "99.99% ± 0.01%"),
        (9e-5, 9e-6, "99.99% ± 0.01%"),
        (2e-5, math.nan, "about 99.99%"),
        (0.3, math.nan, "about 70.00%"),
        (1.0, 0.05, "0.00% ± 5.00%"),
    ],
)
def test_nothing_is_removed_to_a_hundred_percent(share, error, said):
    assert removed(Remainder(share, error, 1.0)) == said


def test_few_images_are_named_beside_advice_for_better_targets():
    """docs/evidence.md has the trainings: harm on 1,000 images, none on 5,000."""
    (line,) = advice_on_few_images(1000)
    assert line.startswith("1,000 images are few: ")
    assert "--data.held_out" in line
    assert advice_on_few_images(5000) == []
