"""The command line that measures an entry again, from its settings in the table."""

import json
import shlex
from typing import Any

from lit_knn.referee.page.results import Entry


def command(entry: Entry) -> str | None:
    """Return the command; None if the settings are not those of a class."""
    try:
        settings = json.loads(entry.facts["settings"])
    except ValueError:
        return None
    if not isinstance(settings, dict) or not isinstance(settings.get("class_path"), str):
        return None
    words = [
        "python",
        "-m",
        "lit_knn.referee",
        "run",
        "--case",
        entry.facts["case"],
        *_options("--estimator", settings),
    ]
    return shlex.join([*words, "--name", entry.name])


def _options(option: str, value: Any) -> list[str]:
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        inside = value.get("init_args") or {}
        return [option, value["class_path"], *(w for k, v in inside.items() for w in _options(f"{option}.{k}", v))]
    return [option, value if isinstance(value, str) else json.dumps(value)]
