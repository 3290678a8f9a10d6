"""The notebooks of docs/notebooks run: their cells, one after the other, in this process."""

import json
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from tests import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text())["cells"] for path in sorted(FOLDER.glob("*.ipynb"))}


def run(name):
    names = {}
    with torch.random.fork_rng(), matplotlib.rc_context({"backend": "Agg"}):
        for cell in NOTEBOOKS[name]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    plt.close("all")
    return names


def test_the_errors_of_estimators_have_their_order():
    # The last errors in one dimension are those of the KNN at t = 10.
    assert 0 < run("one_dimension")["errors"][-1] < 1
    peaks = {name: max(errors) for name, errors in run("score_error")["curves"].items()}
    assert peaks["SubspaceKNN"] < peaks["KNN"] < peaks["STF"] < peaks["one sample"]


def test_an_own_estimator_has_no_variance(capsys):
    rows = run("own_estimator")["rows"]
    assert {row["mu_variance"] for row in rows if row["estimator"].startswith("Nearest")} == {""}
    assert "z must be (B, 1, 8, 8), got (2, 3)" in capsys.readouterr().out


def test_exact_samples_are_copies_and_hybrid_ones_are_not():
    names = run("memorisation")
    nearest = [names["nearest_images"](images, names["reference"]) for images in names["samples"].values()]
    shares = [names["is_copied"](found).float().mean() for found in nearest]
    assert shares[0] > 0.95
    assert shares[-1] < 0.1


def test_a_model_is_trained_in_plain_pytorch():
    names = run("plain_pytorch")
    losses = names["losses"]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert names["samples"].isfinite().all()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_stored_small_and_links_lead_somewhere(name):
    outputs = [output for cell in NOTEBOOKS[name] for output in cell.get("outputs", ())]
    assert outputs
    assert "error" not in {output["output_type"] for output in outputs}
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 150_000
    texts = ["".join(cell["source"]) for cell in NOTEBOOKS[name] if cell["cell_type"] == "markdown"]
    links = re.findall(r"\]\(([^)#]+)\)", "".join(texts))
    assert [link for link in links if not (FOLDER / link).exists()] == []
