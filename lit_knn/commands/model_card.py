"""The model card of an exported model, written as Markdown from the facts of its training."""

from typing import Any

import yaml

from lit_knn.commands.report_page import table
from lit_knn.commands.training_facts import Facts
from lit_knn.common.errors import printable
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import TITLES
from lit_knn.runs.record import images_without_mirrored
from lit_knn.sampling import GenerativeModel

TAGS = {
    "consistency": ["consistency-model"],
    "diffusion": ["diffusion-model", "edm"],
    "flow": ["flow-matching"],
    "mean_flow": ["flow-matching", "meanflow"],
}


def model_card(name: str, model: GenerativeModel, facts: Facts) -> str:
    """Write the card of a model.

    Args:
        name: that of the folder that holds the model.
        model: describes itself and its network.
        facts: those of the training; unknown ones are left out.
    """
    name = printable(name)
    lines = ["---"]
    lines += _front_matter(model, facts)
    lines += ["---", "", f"# {name}", ""]
    lines += [f"`{model!r}`, trained with lit_knn.", ""]

    lines += _section("Use", _use(name, model, facts))
    lines += _section("Network", _network(model, facts))
    lines += _section("Training", _training(facts))
    lines += _section("Metrics", _metrics(facts))
    if facts.config:
        lines += _section("Configuration", _configuration(facts))
    return "\n".join(lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _front_matter(model: GenerativeModel, facts: Facts) -> list[str]:
    front: dict[str, Any] = {"library_name": "lit_knn"}
    tags = ["lit_knn", "pytorch", *TAGS.get(model.kind, [])]
    # The Hub has a pipeline of unconditional images, and none of images of a class.
    if model.num_classes:
        tags.append("class-conditional")
    elif are_pictures(model.image_shape) and not facts.autoencoder:
        front["pipeline_tag"] = "unconditional-image-generation"
    front["tags"] = tags

    licence = "# The licence is yours to choose, and the data may limit it: add a line such as `license: cc-by-4.0`."
    return [licence, *yaml.safe_dump(front, sort_keys=False).splitlines()]


def _use(name: str, model: GenerativeModel, facts: Facts) -> list[str]:
    """Show how to load and sample the model, in Python and in words."""
    net = ""
    lines = ["```python", "import lit_knn"]
    class_path = network_class(model)
    if class_path:
        package, _, kind = class_path.rpartition(".")
        lines.append(f"from {package} import {kind}  # not in this folder: its authors have it")
        options = [f"{option}={value!r}" for option, value in _network_options(facts).items()]
        net = f", net={kind}({', '.join(options)})"

    shape = ", ".join(map(str, model.image_shape))
    space = _space(model, facts)
    lines.append("")
    lines.append(f'model = lit_knn.load("{name}"{net})  # the folder of this card')
    lines.append(f"samples = model.sample(seeds=range(16))  # (16, {shape}) float32, {space}")
    lines += ["```", ""]

    words = f"A sample depends on its seed alone. {_meaning(model, facts)}"
    if model.num_classes:
        by_name = " by number or name (`model.class_names`)" if model.class_names else ""
        words += " The model is class-conditional: `class_label` chooses one of "
        words += f"{model.num_classes} classes{by_name}; without it the seed does."
    lines.append(words)
    return lines


def network_class(model: GenerativeModel) -> str:
    """Return the class path of a network that lit_knn does not have; "" for our networks."""
    if model.description()["architecture"] is not None:
        return ""

    kind = type(model.net)
    return f"{kind.__module__}.{kind.__qualname__}"


def _network_options(facts: Facts) -> dict[str, Any]:
    """Return the options of the network in the run's configuration, as far as it is known."""
    init_args = (facts.config.get("model") or {}).get("init_args") or {}
    return (init_args.get("net") or {}).get("init_args") or {}


def _space(model: GenerativeModel, facts: Facts) -> str:
    pictures = are_pictures(model.image_shape) and not facts.autoencoder
    return "model space" if pictures else "as the training data"


def _meaning(model: GenerativeModel, facts: Facts) -> str:
    """Say what the numbers of a sample are."""
    if facts.autoencoder:
        decoder = printable(facts.autoencoder)
        return f"Samples are latents, not images: decode them with the training's `{decoder}`."
    if are_pictures(model.image_shape):
        return "Pixels p from 0 to 255 are p / 127.5 - 1 in model space."

    return "If the training data were latents, decode the samples with their autoencoder."


def _network(model: GenerativeModel, facts: Facts) -> list[str]:
    """Make a table of the network's class, its options and those of the model around it."""
    architecture = model.description()["architecture"]
    if architecture is None:
        architecture = {"class": network_class(model), "options": _network_options(facts)}

    options = {"class": architecture["class"]}
    options |= architecture["options"]
    options |= model.options()

    rows = [["option", "value"]]
    for name, value in options.items():
        rows.append([name, printable(str(value))])
    return table(rows)


def _training(facts: Facts) -> list[str]:
    """Make a table of what is known of the training, one fact a row, without a header."""
    model = facts.config.get("model") or {}
    estimator = (model.get("init_args") or {}).get("estimator") or {}
    hours = f"{facts.hours:.3g} hours, without validations" if facts.hours else "-"
    rows = [
        ["", ""],
        ["trained by", str(model.get("class_path", "-"))],
        ["target estimated by", str(estimator.get("class_path", "-"))],
        ["optimiser steps", f"{facts.steps:,}"],
        ["images seen", f"{facts.images_seen:,}"],
        ["time", hours],
        ["hardware", "; ".join(facts.hardware) or "-"],
    ]
    for name, value in facts.data.items():
        if name == "images" and facts.data.get("hflip"):
            value = f"{images_without_mirrored(facts.data)}, and their mirror images"
        rows.append([f"data: {name}", str(value)])
    for name, version in facts.versions.items():
        rows.append([name, str(version)])
    return [printable(line) for line in table(rows)]


def _metrics(facts: Facts) -> list[str]:
    """Make a table of the last measurements of these weights."""
    if not facts.metrics:
        return ["No measurement of these weights was found."]

    rows = [["metric", "value", "measured at images seen"]]
    for name, (seen, value) in facts.metrics.items():
        rows.append([TITLES.get(name, name), f"{value:.6g}", f"{seen:,}"])

    lines = [printable(line) for line in table(rows)]
    lines += ["", f"The weights have seen {facts.images_seen:,} images."]
    return lines


def _configuration(facts: Facts) -> list[str]:
    text = yaml.safe_dump(facts.config, sort_keys=False, allow_unicode=True)
    # A fence inside would end the block.
    lines = text.replace("```", "'''").splitlines()
    return ["```yaml", *lines, "```"]
