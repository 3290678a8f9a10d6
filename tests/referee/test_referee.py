"""The referee: it judges estimators of known error rightly, refuses bad ones, and freezes its cases."""

import csv
import json
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_knn.commands import entry as command_line
from lit_knn.commands.referee import options_of
from lit_knn.common.errors import InputError
from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample
from lit_knn.index import exact_index
from lit_knn.referee import memory, protocol, referee
from lit_knn.referee.behaviour import Contestant
from lit_knn.referee.cases import CASES, loading
from lit_knn.referee.cases.loading import load_case, record_of, recorded
from lit_knn.referee.entry import about
from lit_knn.referee.memory import copy_of_set
from lit_knn.referee.page.content import command
from lit_knn.referee.page.results import read_results
from lit_knn.referee.protocol import Options
from lit_knn.referee.table import COLUMNS, add_row, read_table
from lit_knn.reference import ReferenceSet
from tests.any_data import enumerated_mean

SHIFT, SPREAD = 0.02, 0.05
QUICK = Options(repeats=4, memory=False)
# This file has the estimators of docs/referee.md, and three more. The last one fails while t = 1 is measured.
OWN_FILE = "\n".join(
    re.findall(r"```python\n# my_file.py\n(.*?)```", Path("docs/referee.md").read_text(), flags=re.DOTALL)
)
OWN_FILE += """
from lit_knn.estimators import KNN
from lit_knn.index import TorchIndex

class Mine(KNN):
    referee_note = "a test"

class MyIndex(TorchIndex):
    pass

def zero(z, t, generator):
    return torch.zeros_like(z)

calls = 0

def tires(z, t, generator):
    global calls
    calls += t[0].item() == 1
    return z * (float("nan") if calls > 60 else 0)
"""


def main(arguments):
    command_line.main(["referee", *arguments])


class Noisy(Exact):
    """The exact mean plus a constant and noise: its squared bias is shift², its variance spread²."""

    deterministic = False

    def _posterior_mean(self, z, t, x_source, generator):
        noise = torch.randn(z.shape, generator=generator)
        return super()._posterior_mean(z.double(), t, x_source, generator) + SHIFT + SPREAD * noise


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def loaded(cache):
    return load_case(replace(CASES["digits"], name="short", levels=(0.5, 2, 10)), None, 32, cache)


@pytest.fixture
def measured(loaded, cache):
    def rows(estimator, options=QUICK):
        return referee(estimator, loaded.case, options=replace(options, cache=cache, latents=32))

    return rows


# Errors


def test_known_errors_are_found_within_their_standard_errors(measured):
    # In batches of one, equal draws in each repeat would show as a variance of 0.
    for row in measured(Noisy(), replace(QUICK, batch=1)):
        # 32 latents x 4 repeats x 64 dimensions: the variance is known to about 2 per cent.
        for name, truth in [("variance", SPREAD**2), ("bias_sq", SHIFT**2), ("mse", SHIFT**2 + SPREAD**2)]:
            value, error = float(row[name]), float(row[f"{name}_se"])
            assert abs(value - truth) < 4 * error, name
            assert error < 0.1 * (SHIFT**2 + SPREAD**2)
        assert float(row["score_mse"]) == pytest.approx(float(row["mse"]) / float(row["t"]) ** 4, rel=1e-4)
        assert (row["repeats_itself"], row["needs_source"]) == ("yes", "no")
        assert row["batch_gap"] == "" == row["certified_mse"]


def test_the_exact_estimator_has_no_error_and_the_reference_ratio_one(measured, loaded):
    for row in measured(Exact()):
        # Its products are in float32.
        assert float(row["mse"]) < 1e-13
        assert float(row["variance"]) == 0
        assert row["repeats_itself"] == "yes"
        # Batches of other sizes round otherwise: two means, each within the error above.
        assert float(row["batch_gap"]) < 4e-13
    case = loaded.case
    for row in measured(KNN(case.k, case.n)):
        assert row["mse_ratio"] == "1"
        assert float(row["ms_low"]) <= float(row["ms"]) <= float(row["ms_high"])
        # The variance of Eq. 12 with the draws' own weights is the error to first order.
        assert 0.5 < float(row["certified_share"]) < 2


def test_certificates_are_compared_with_the_error_of_all_latents(measured, monkeypatch):
    def certified(self, z, t, x_source=None, generator=None):
        stated = torch.where(torch.arange(len(z)) < 2, 3.0, 1.0).double()
        return type("Certified", (), {"sq_error": stated})

    monkeypatch.setattr(KNN, "certified_mean", certified)
    # 32 latents in batches of 12, 12 and 8: six state 3, the others 1.
    stated = np.array([3.0] * 6 + [1.0] * 26)
    for row in measured(KNN(20, 5), replace(QUICK, batch=12)):
        assert float(row["certified_mse"]) == pytest.approx(stated.mean(), rel=1e-5)
        assert float(row["certified_share"]) == pytest.approx(stated.mean() / float(row["mse"]), rel=1e-4)
        assert float(row["certified_spread"]) == pytest.approx(stated.std(ddof=1) / stated.mean(), rel=1e-4)


def test_a_source_is_drawn_from_the_posterior(measured, loaded):
    # One draw from the posterior has no bias, and its variance is the posterior's.
    rows = {row["t"]: row for row in measured(OneSample(), replace(QUICK, repeats=16))}
    for row in rows.values():
        assert abs(float(row["bias_sq"])) < 4 * float(row["bias_sq_se"]) + 1e-12
    z, mu = loaded.z(2), loaded.means[2]
    images = loaded.reference.gather(torch.arange(loaded.reference.N)).double().flatten(1)
    weights = torch.softmax(-torch.cdist(z.double().flatten(1), images).square() / 8, dim=1)
    variance = (weights @ images.square() - mu.flatten(1).square()).mean().item()
    # 16 draws of 32 posteriors of 64 dimensions.
    assert float(rows["2"]["variance"]) == pytest.approx(variance, rel=0.2)
    assert rows["2"]["needs_source"] == "yes"
    assert measured(STF(5))[0]["needs_source"] == "uses it"


def test_times_are_of_equal_turns_and_errors_of_latents(loaded, monkeypatch):
    """The processor's clock is replaced by one that each call moves by a known time."""
    now, calls, orders = [0.0], [], []

    def mean(self, z, t, x, generator):
        own, repeat = self.name == "noisy", max(len(calls) - 2, 0) // 2
        # The machine is slower in some repeats, for one contestant or both. The first call of each does not count.
        now[0] += ((3, 8, 3, 8) if own else (2, 2, 6, 8))[repeat] * len(z) + 1000 * (len(calls) < 2)
        calls.append("own" if own else "reference")
        # Later repeats have other batches, so each latent is found by its values.
        ids = (z.flatten(1)[:, None] == loaded.z(t).flatten(1)).all(2).double().argmax(1)
        orders.append(ids.tolist())
        # The same error in each repeat: it is known no better than by the latents, where it is 0 or 1, or 0 or 2.
        return loaded.means[t][ids] + (ids % 2).reshape(-1, 1, 1, 1) * (2**0.5 if own else 1)

    monkeypatch.setattr(Contestant, "mean", mean)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now[0])
    row = protocol.Contest(Contestant("noisy", Noisy()), loaded, 32, 4).row(2, protocol.progress_bar(None, "", ""))
    assert [float(row[name]) for name in ("ms", "ms_low", "ms_high", "reference_ms")] == [5500, 3000, 8000, 4000]
    # Both took turns in each repeat, so the ratios of the repeats count: 1.5, 4, 0.5 and 1.
    assert [float(row[name]) for name in ("time_ratio", "time_ratio_low", "time_ratio_high")] == [1.25, 0.5, 4]
    assert (float(row["mse"]), float(row["mse_ratio"])) == pytest.approx((1, 2), rel=1e-5)
    # 32 numbers that are 0 or 2: deviation 1, corrected by 31.
    assert float(row["mse_se"]) == pytest.approx(31**-0.5, rel=1e-4)
    assert calls[2:] == ["own", "reference", "reference", "own"] * 2
    # Each repeat but the first has the latents in another order.
    repeats = orders[2::2]
    assert repeats == orders[3::2]
    assert repeats[0] == list(range(32))
    assert len({tuple(order) for order in repeats}) == 4
    assert all(sorted(order) == repeats[0] for order in repeats)


class Odd(Exact):
    """Is off in each way that the columns on behaviour tell."""

    calls = 0

    def _posterior_mean(self, z, t, x_source, generator):
        Odd.calls += 1
        off = 0.1 * ((t == 2) & (len(z) > 8)) + 1e-7 * Odd.calls
        return super()._posterior_mean(z.double(), t, x_source, generator) + off


def test_behaviour_is_told(measured):
    row = measured(Odd())[0]
    assert (row["repeats_itself"], row["needs_source"]) == ("no", "no")
    # At the worst level, whichever it is: batches of one are not off.
    assert float(row["batch_gap"]) == pytest.approx(0.01, rel=0.01)


# Bad estimators


def fails(z, t, generator):
    raise RuntimeError("no such thing\nmore")


class Wants:
    def __init__(self, reference, k):
        pass


class HidesThatItNeedsASource(OneSample):
    uses_source = False


@pytest.mark.parametrize(
    ("estimator", "told"),
    [
        (lambda z, t, generator: z.flatten(1), "must be a tensor"),
        (lambda z, t, generator: z * (torch.nan if t[0] == 2 else 0), "not finite"),
        (lambda z, t, generator: torch.zeros_like(z, dtype=torch.int64), "float type"),
        (lambda z, t, generator: torch.randn_like(z), "global random numbers"),
        (lambda z, t, generator: z * 0 + np.random.rand(), "global random numbers"),  # noqa: NPY002
        (lambda z, t, generator: z * 0 + random.random(), "global random numbers"),
        (lambda z, t, generator: z.mul_(0.5), "changes its argument z or t"),
        (lambda z, t, generator: z * t.add_(1)[0], "changes its argument z or t"),
        (fails, "RuntimeError: no such thing"),
        (lambda z, t, generator: sys.exit(3), "SystemExit: 3"),
        (Wants, "missing 1 required positional argument"),
        (HidesThatItNeedsASource(), "x_source"),
        (KNN(5000, 4), "5000"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else None,
)
def test_a_bad_estimator_is_refused_in_one_line(measured, estimator, told):
    with pytest.raises(InputError, match=told) as caught:
        measured(estimator)
    assert "\n" not in str(caught.value)


def test_noise_levels_are_floats_even_where_a_case_names_integers(measured):
    assert len(measured(lambda z, t, generator: z * (t**-2 * t.new_zeros(()))[0])) == 3


# Cases


def test_means_are_computed_once(loaded, cache, monkeypatch):
    monkeypatch.setattr(loading, "exact_means", None)
    again = load_case(loaded.case, None, 32, cache)
    assert all(torch.equal(again.means[t], loaded.means[t]) for t in loaded.case.levels)
    with pytest.raises(TypeError):
        load_case(replace(loaded.case, levels=(0.5, 2, 9)), None, 32, cache)
    with pytest.raises(FileExistsError):  # A folder that cannot be made is known before the long work.
        load_case(replace(loaded.case, levels=(0.5, 2, 9)), None, 32, Path(__file__))


@pytest.mark.parametrize("name", ["digits", "toy2d"])
def test_the_recorded_cases_are_what_they_were(name, cache):
    # The data, latents and means of this machine are compared with the recorded ones inside.
    loaded = load_case(CASES[name], None, 8, cache)
    (known,) = recorded(CASES[name])
    assert known["data"] == loaded.reference.fingerprint()


def test_other_data_latents_and_means_are_noticed(cache, monkeypatch, tmp_path, capsys):
    case = replace(CASES["digits"], levels=(0.5, 2), latents=8)
    monkeypatch.setattr(loading, "RECORDED", tmp_path)
    # A case without a record is not compared.
    known = record_of(load_case(case, None, 8, cache))

    def load(record, case, *data):
        (tmp_path / "digits.json").write_text(json.dumps([known | record]))
        return load_case(case, *data or (None,), 8, cache)

    load({}, case)
    moved = {t: [value + 1e-6 for value in values] for t, values in known["means"].items()}
    for change in ({"data": "0" * 64}, {"latents": "0" * 64}, {"means": moved}):
        with pytest.raises(InputError, match="case digits"):
            load(change, case)
    # A copy that the user names may be another one, and a line says so.
    images, named = case.images(), replace(case, images="a recipe")
    np.save(tmp_path / "copy.npy", images)
    load({"data": "0" * 64}, named, tmp_path / "copy.npy")
    assert "not comparable" in capsys.readouterr().err
    np.save(tmp_path / "less.npy", images[:9])
    with pytest.raises(InputError, match=r"less\.npy"):
        load({}, named, tmp_path / "less.npy")


def test_contestants_have_the_mirror_images_and_the_labels_of_the_case(cache):
    images = torch.randint(256, (20, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    reference = ReferenceSet(images, hflip=True, labels=torch.arange(20) % 3)
    copied, everything = copy_of_set(reference, exact_index()), torch.arange(40)
    assert copied.index is not reference.index
    assert torch.equal(copied.gather(everything), reference.gather(everything))
    assert torch.equal(copied.labels, reference.labels)
    case = replace(CASES["digits"], name="mirrored", images=images.numpy, shape=images.shape, hflip=True, latents=8)
    # Without the mirror images the means would be others at large t.
    z, t = (loaded := load_case(case, None, None, cache)).z(10), torch.full((8,), 10.0).double()
    torch.testing.assert_close(loaded.means[10], enumerated_mean(reference, z, t))
    for row in referee(Exact(), case, options=Options(repeats=2, memory=False, cache=cache)):
        assert float(row["mse"]) < 1e-12


# The command and its table


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    return path


def test_entries_by_class_path_config_and_own_file(own):
    for arguments, kind, settings, name in [
        ("KNN --estimator.k 7 --index FaissIndex --index.factory SQ8", KNN, {"k": 7}, "KNN(k=7), SQ8"),
        ("configs/estimators/knn.yaml --estimator.n 3", KNN, {"n": 3}, "KNN(n=3)"),
        ("lit_knn.estimators.Exact --index TorchIndex", Exact, {}, "Exact, TorchIndex"),
        (f"{own}:Mine --estimator.k=9 --index {own}:MyIndex", KNN, {"k": 9}, f"{own}:Mine(k=9), {own}:MyIndex"),
    ]:
        options = options_of(["--case", "digits", "--estimator", *arguments.split()])
        entry = about(options.estimator, options.index)
        assert isinstance(options.estimator, kind)
        assert settings.items() <= options.estimator.settings().items()
        assert settings.items() <= json.loads(entry["settings"])["init_args"].items()
        assert entry["name"] == name
    assert (entry["origin"], entry["note"]) == ("own file", "a test")
    for name in ("zero", "Centre"):
        estimator = options_of(["--case", "digits", "--estimator", f"{own}:{name}"]).estimator
        assert isinstance(estimator, Estimator)
        assert json.loads(about(estimator)["settings"]) == {"class_path": f"{own}:{name}"}


def table_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_command_adds_and_replaces_rows(tmp_path, own, cache, capsys, monkeypatch):
    monkeypatch.setattr(protocol, "in_own_process", lambda work, *args: 7)
    output = tmp_path / "results.csv"
    common = ["--case", "digits", "--output", str(output), "--cache", str(cache), "--latents", "8", "--repeats", "2"]
    main([*common, "--no_memory", "--estimator", f"{own}:Centre"])
    main(["run", *common, "--no_memory", "--estimator", f"{own}:zero", "--name", "nothing"])
    main([*common, "--estimator", f"{own}:Centre"])
    rows = table_of(output)
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["name"], row["peak_mib"]) for row in rows] == 6 * [("nothing", "")] + 6 * [(f"{own}:Centre", "7")]
    for name in ("shrunk", "NearestImage"):
        main([*common, "--no_memory", "--estimator", f"{own}:{name}"])
    rows = table_of(output)
    centre, nearest = rows[6:12], rows[18:]
    # At large t the posterior mean is the centre of the data, and at small t it is the nearest image.
    assert float(centre[-1]["mse"]) < 1e-2 < float(rows[5]["mse"])
    assert float(nearest[0]["mse"]) < 1e-6 < float(centre[0]["mse"])
    assert nearest[0]["note"].startswith("takes the nearest image")
    assert "set-up" in capsys.readouterr().out
    for arguments, told in [
        (["--estimator", f"{own}:absent"], "has no class or function absent"),
        (["--estimator", "no_such.yaml"], "--estimator no_such.yaml: no such file"),
        ([], "--estimator is missing"),
        (["--estimator", "OneSample", "--case", "absent"], "no such case"),
        (["--estimator", "OneSample", "--case", "cifar10"], "needs --data"),
        (["--estimator", "OneSample", "--data", "absent.zip"], "makes its own data"),
        (["--estimator", "OneSample", "--repeats", "1"], "--repeats"),
    ]:
        with pytest.raises(SystemExit):
            main([*common, "--no_memory", *arguments])
        err = capsys.readouterr().err
        assert told in err, arguments
        assert err.count("\n") == 1
    assert table_of(output) == rows
    # Levels that were finished stay.
    with pytest.raises(SystemExit, match="2"):
        main([*common[:-1], "60", "--no_memory", "--estimator", f"{own}:tires"])
    assert [row["t"] for row in table_of(output)[24:]] == ["0.2", "0.5"]


def test_the_printed_command_repeats_a_row(tmp_path, cache):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    given = "--estimator KNN --estimator.k 20 --estimator.n 5 --index FaissIndex --index.factory SQ8 --batch 5"
    given += f" --case digits --latents 9 --repeats 2 --threads {torch.get_num_threads()} --name again"
    main([*given.split(), "--no_memory", "--cache", str(cache), "--output", str(first)])
    ((entry,),) = (results.entries for results in read_results([first]))
    words = shlex.split(command(entry))
    assert words[:3] == ["lit-knn", "referee", "run"]
    assert words[words.index("--threads") + 1] == str(torch.get_num_threads())
    main([*words[2:], "--no_memory", "--cache", str(cache), "--output", str(second)])
    same = ("name", "settings", "t", "mse", "bias_sq", "variance", "mse_ratio", "latents", "batch")
    assert [[row[name] for name in same] for row in table_of(second)] == [
        [row[name] for name in same] for row in table_of(first)
    ]
    entry.facts |= {"case": "cifar10", "latents": "256"}
    assert command(entry).endswith("--data PATH --name again")


def test_a_table_of_another_protocol_or_data_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    row = dict.fromkeys(COLUMNS, "") | {"protocol": "1", "case": "digits", "data": "a", "name": "x"}
    add_row(path, row)
    with pytest.raises(InputError, match="of the data a, these are b"):
        add_row(path, row | {"data": "b"})
    add_row(path, other := row | {"case": "cifar10", "data": "b"})
    assert read_table(path) == [row, other]
    for text, told in ((path.read_text().replace("\n1,", "\n0,"), "'0'"), ("a,b\n1,2\n", "None")):
        path.write_text(text)
        with pytest.raises(InputError, match=f"protocol of its rows is {told}"):
            add_row(path, row)


def test_a_row_replaces_one_of_the_same_measurement_alone(tmp_path):
    # A row of the same estimator, settings and machine is measured again; any other row is another measurement.
    same = {"case", "name", "settings", "t", "latents", "repeats", "batch", "threads", "cpu", "cores", "memory_gb"}
    row = dict.fromkeys(COLUMNS, "1") | {"protocol": 1}
    for column in set(COLUMNS) - {"protocol", "data"}:
        path = tmp_path / f"{column}.csv"
        add_row(path, row)
        add_row(path, {**row, column: "2"})
        assert [one[column] for one in read_table(path)] == (["1", "2"] if column in same else ["2"])


def test_memory_is_in_mib(monkeypatch, loaded):
    taken = {"VmRSS": 100 * 2**20, "VmHWM": 350 * 2**20}
    monkeypatch.setattr(memory, "process_bytes", taken.__getitem__)
    assert memory.peak_mib("exact", lambda: (Exact(), exact_index()), loaded.case, None, 4) == 250
    monkeypatch.setattr(memory, "process_bytes", lambda *_: 0)  # as on a Mac
    assert memory.peak_mib("exact", lambda: (Exact(), exact_index()), loaded.case, None, 4) == ""
