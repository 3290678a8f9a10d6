"""The model card: what a person must know of an exported model, as Markdown with YAML front matter."""

from typing import Any

import yaml

from lit_knn.commands.report import table
from lit_knn.commands.run_facts import Facts
from lit_knn.common.errors import printable
from lit_knn.common.tables import TITLES
from lit_knn.sampling import GenerativeModel

TAGS = {
    "consistency": ["consistency-model"],
    "diffusion": ["diffusion-model", "edm"],
    "flow": ["flow-matching"],
}
CHANNELS_OF_PICTURES = (1, 3)


def model_card(name: str, model: GenerativeModel, facts: Facts) -> str:
    """Write the card of a model.

    Args:
        name: name of the folder that holds the model.
        model: the model.
        facts: what is known of its training.
    """
    name = printable(name)
    lines = ["---", *_front_matter(model), "---", "", f"# {name}", "", f"`{model!r}`, trained with lit_knn.", ""]
    lines += ["## Use", "", *_use(name, model), "", "## Network", "", *_network(model), ""]
    lines += ["## Training", "", *_training(facts), ""]
    lines += ["## Metrics", "", *_metrics(facts), ""]
    if facts.config:
        text = yaml.safe_dump(facts.config, sort_keys=False, allow_unicode=True)
        lines += ["## Configuration", "", "```yaml", *text.replace("```", "'''").splitlines(), "```", ""]
    return "\n".join(lines)


def _front_matter(model: GenerativeModel) -> list[str]:
    picture = len(model.image_shape) == 3 and model.image_shape[0] in CHANNELS_OF_PICTURES
    said: dict[str, Any] = {"library_name": "lit_knn"}
    if picture:
        said["pipeline_tag"] = "unconditional-image-generation"
    said["tags"] = ["lit_knn", "pytorch", *TAGS.get(model.kind, [])]
    licence = "# The licence is yours to choose, and the data may limit it: add a line such as `license: cc-by-4.0`."
    return [licence, *yaml.safe_dump(said, sort_keys=False).splitlines()]


def _use(name: str, model: GenerativeModel) -> list[str]:
    shape = ", ".join(map(str, model.image_shape))
    net = ", net=..." if model.description()["architecture"] is None else ""
    lines = [
        "```python",
        "import lit_knn",
        "",
        f'model = lit_knn.load("{name}"{net})  # the folder of this card',
        f"images = model.sample(seeds=range(16))  # (16, {shape}) float32, model space",
        "```",
        "",
        "An image depends on its seed alone. Pixels p from 0 to 255 are p / 127.5 - 1 in model space.",
    ]
    if model.num_classes:
        lines[-1] += f" `class_label` chooses one of {model.num_classes} classes; without it the seed does."
    return lines


def _network(model: GenerativeModel) -> list[str]:
    architecture = model.description()["architecture"] or {"class": type(model.net).__name__, "options": {}}
    rows = [["option", "value"], ["class", architecture["class"]]]
    rows += [[name, str(value)] for name, value in {**architecture["options"], **model.options()}.items()]
    return table(rows)


def _training(facts: Facts) -> list[str]:
    time = f"{facts.hours:.3g} hours, without validations" if facts.hours else "-"
    rows = [
        ["", ""],
        ["trained by", _class_path(facts.config, "model")],
        ["target estimated by", _class_path(facts.config, "model", "init_args", "estimator")],
        ["optimiser steps", f"{facts.steps:,}"],
        ["images seen", f"{facts.images_seen:,}"],
        ["time", time],
        ["hardware", "; ".join(facts.hardware) or "-"],
        *([f"data: {name}", str(value)] for name, value in facts.data.items()),
        *([name, str(value)] for name, value in facts.versions.items()),
    ]
    return [printable(line) for line in table(rows)]


def _class_path(config: Any, *keys: str) -> str:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return str(config.get("class_path", "-")) if isinstance(config, dict) else "-"


def _metrics(facts: Facts) -> list[str]:
    if not facts.metrics:
        return ["None was measured in the run's folder."]
    rows = [["metric", "value", "measured at images seen"]]
    for name, (seen, value) in facts.metrics.items():
        rows.append([TITLES.get(name, name), f"{value:.6g}", "-" if seen is None else f"{seen:,}"])
    return [*(printable(line) for line in table(rows)), "", f"The weights have seen {facts.images_seen:,} images."]
