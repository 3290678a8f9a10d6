"""The notebooks of docs/notebooks run: their cells, one after the other, in this process."""

import json
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from tests import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}


def sources(name, kind):
    return ["".join(cell["source"]) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == kind]


def run(name):
    names = {}
    with torch.random.fork_rng(), matplotlib.rc_context({"backend": "Agg"}):
        for source in sources(name, "code"):
            exec(compile(source, f"{name}.ipynb", "exec"), names)
    plt.close("all")
    return names


def test_one_dimension():
    # The last errors are those of the KNN at t = 10.
    assert 0 < run("one_dimension")["errors"][-1] < 1


def test_the_score_of_subspace_knn_is_the_best():
    peaks = {name: max(errors) for name, errors in run("score_error")["curves"].items()}
    assert peaks["SubspaceKNN"] < peaks["KNN"] < peaks["STF"] < peaks["one sample"]


def test_an_own_estimator_has_no_variance(capsys):
    rows = run("own_estimator")["rows"]
    assert {row["mu_variance"] for row in rows if row["estimator"].startswith("Nearest")} == {""}
    assert "z must be (B, 1, 8, 8), got (2, 3)" in capsys.readouterr().out


def test_exact_samples_are_copies_and_hybrid_ones_are_not():
    names = run("memorisation")
    shares = [
        names["is_copied"](names["nearest_images"](images, names["reference"])).float().mean()
        for images in names["samples"].values()
    ]
    assert shares[0] > 0.95
    assert shares[-1] < 0.1


def test_a_model_is_trained_in_plain_pytorch():
    names = run("plain_pytorch")
    losses = names["losses"]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert names["samples"].isfinite().all()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_stored_small_and_links_lead_somewhere(name):
    codes = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in codes)
    assert not any(output["output_type"] == "error" for cell in codes for output in cell["outputs"])
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 150_000
    links = re.findall(r"\]\(([^)#]+)\)", "".join(sources(name, "markdown")))
    assert [link for link in links if not (FOLDER / link).exists()] == []
