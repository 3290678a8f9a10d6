"""Every value of every config is the one of docs/config_values.md, which tells its source."""

from fnmatch import fnmatch

import pytest
import yaml

from tests.config_files import CONFIGS, all_values

PAGE = (CONFIGS.parent / "docs" / "config_values.md").read_text()
FILES = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in sorted(CONFIGS.rglob("*.yaml"))}
OTHERS = "all others"


def read_page():
    """The rows of the page: option, value, files, source."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        (option.strip("`"), yaml.safe_load(value.strip("`")), files, source) for option, value, files, source in cells
    ]


ROWS = read_page()
VALUES = {name: all_values(path) for name, path in FILES.items()}


def is_of(row, name):
    """Tell whether a row names the file; "all others" are the files that no other row of the option names."""
    if row[2] == OTHERS:
        return not any(is_of(other, name) for other in ROWS if other[0] == row[0] and other[2] != OTHERS)
    return any(fnmatch(name, pattern.strip()) for pattern in row[2].split(","))


@pytest.mark.parametrize("name", FILES)
def test_a_config_has_the_values_of_the_page_and_no_others(name):
    for option, value in VALUES[name].items():
        told = [row[1] for row in ROWS if row[0] == option and is_of(row, name)]
        assert told == [value], f"{name}: {option} is {value}, but docs/config_values.md says {told}"


def test_every_row_is_of_a_config_and_has_a_source():
    for row in ROWS:
        assert any(row[0] in VALUES[name] and is_of(row, name) for name in FILES), row
        assert row[3], row


def test_the_page_has_the_options_that_decide_results():
    # A fault in reading the configs would make both sides empty.
    assert len(ROWS) > 200
    assert VALUES["table1/ict_knn"]["model.estimator.k"] == 2048
    assert VALUES["demo"]["model.sigma_max"] == 80.0
    assert VALUES["figure3/digits"]["trainer.callbacks.EstimatorError.estimators.STF"] == "STF(n=64)"
    assert VALUES["evaluate/fid"]["trainer.callbacks.Fidelity.mirrored"] is False
