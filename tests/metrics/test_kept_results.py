"""Results that are kept for later runs, and the settings that they depend on."""

import json
import os
from pathlib import Path

from lit_knn.common.tables import read_rows
from lit_knn.metrics.kept_results import KeptResults


def test_results_are_found_again_with_the_same_settings_alone(tmp_path):
    def kept(settings):
        columns = {"name": str, "t": float, "mse": float}
        return KeptResults(tmp_path / "new" / "rows.csv", columns, ("name", "t"), settings)

    first = kept({("a",): {"k": 1}, ("b",): {"k": 2}})
    assert first.find("a", 0.5) is None
    first.add({"name": "a", "t": 0.5, "mse": 0.1})
    assert first.find("a", 0.5)["mse"] == kept({("a",): {"k": 1}}).find("a", 0.5)["mse"] == 0.1
    assert (
        first.find("b", 0.5)
        is first.find("a", 1.0)
        is kept({("a",): {"k": 3}}).find("a", 0.5)
        is None
    )


def test_a_row_is_never_there_before_the_settings_that_it_names(tmp_path, monkeypatch):
    path, replaced, seen = tmp_path / "rows.csv", os.replace, []

    def watched(source, target):
        if Path(target) == path:
            for row in read_rows(Path(source)):
                seen.append(
                    json.loads((tmp_path / "settings" / f"{row['settings']}.json").read_text())
                )
        replaced(source, target)

    monkeypatch.setattr(os, "replace", watched)
    KeptResults(path, {"name": str}, ("name",), {(): {"k": 1}}).add({"name": "a"})
    assert seen == [{"k": 1}]
