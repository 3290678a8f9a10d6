"""The command line that measures an entry again, from its settings in the table."""

import json
import shlex
from typing import Any

from lit_knn.referee.cases import CASES
from lit_knn.referee.page.results import Entry


def command(entry: Entry) -> str | None:
    """Return the command, with PATH for the data; None if the settings are not those of a class or function."""
    facts = entry.facts
    try:
        settings = json.loads(facts["settings"])
    except ValueError:
        return None
    if not _is_class(settings):
        return None
    words = ["lit-knn", "referee", "run", "--case", facts["case"], *_options("--estimator", settings)]
    words += _options("--index", settings["index"]) if _is_class(settings.get("index")) else []
    words += [word for name in ("batch", "repeats", "threads") if facts[name] for word in (f"--{name}", facts[name])]
    case = CASES.get(facts["case"])
    if case is not None and facts["latents"] and int(facts["latents"]) < case.latents:
        words += ["--latents", facts["latents"]]
    if case is not None and case.recipe is not None:
        words += ["--data", "PATH"]
    return shlex.join([*words, "--name", entry.name])


def _options(option: str, value: Any) -> list[str]:
    if _is_class(value):
        arguments = value.get("init_args") or {}
        parts = [word for name, part in arguments.items() for word in _options(f"{option}.{name}", part)]
        return [option, value["class_path"], *parts]
    return [option, value if isinstance(value, str) else json.dumps(value)]


def _is_class(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("class_path"), str)
