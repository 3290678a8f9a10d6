"""The model card of an exported model: a page in Markdown, with front matter for the Hugging Face Hub."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import yaml

from lit_knn.commands.report_page import table
from lit_knn.commands.training_facts import Facts
from lit_knn.common.errors import printable
from lit_knn.common.extras import is_installed
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import TITLES
from lit_knn.runs.names import option_of, options_in
from lit_knn.runs.record import images_without_mirrored
from lit_knn.sampling import GenerativeModel

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

CARD_NAME = "README.md"
PAGE = """\
# {name}

`{model!r}`, trained with lit_knn.

## Use

```python
{code}
```

A sample depends on its seed alone. {meaning}

## Metrics

{metrics}
"""
LICENCE = """
<!-- The licence is yours to choose, and the data may limit it:
     add a line such as `license: cc-by-4.0` to the front matter. -->

"""
TAGS = {
    "consistency": ["consistency-model"],
    "diffusion": ["diffusion-model", "edm"],
    "flow": ["flow-matching"],
    "mean_flow": ["flow-matching", "meanflow"],
}


def model_card(name: str, model: GenerativeModel, facts: Facts) -> str:
    """Return the text of a model's card, with front matter if the package of the Hugging Face Hub is installed.

    Args:
        name: name of the folder that holds the model.
        model: the model.
        facts: facts of its training; unknown ones are left out.
    """
    name = printable(name)
    code = code_of_use(name, model, facts)
    meaning = meaning_of_samples(model, facts)
    page = PAGE.format(
        name=name, model=model, code=code, meaning=meaning, metrics=metrics_table(facts)
    )

    page += yaml_section("Model", model.description())
    page += yaml_section("Training", training_facts(facts))
    if facts.config:
        page += yaml_section("Configuration", facts.config)
    if not is_installed("huggingface_hub"):
        return page

    from huggingface_hub import ModelCard

    front_matter = front_matter_of(model, facts).to_yaml()
    return str(ModelCard(f"---\n{front_matter}\n---\n{LICENCE}{page}"))


def front_matter_of(model: GenerativeModel, facts: Facts) -> "ModelCardData":
    """Return the data by which the Hub shows and finds the model: library, tags, and the pipeline if there is one."""
    from huggingface_hub import ModelCardData

    tags = ["lit_knn", "pytorch", *TAGS.get(model.kind, [])]
    pipeline = None
    # A pipeline is the Hub's name of a task. It has one for unconditional images, but none for images of a class.
    if model.num_classes:
        tags.append("class-conditional")
    elif draws_pictures(model, facts):
        pipeline = "unconditional-image-generation"
    return ModelCardData(library_name="lit_knn", pipeline_tag=pipeline, tags=tags)


def draws_pictures(model: GenerativeModel, facts: Facts) -> bool:
    """Return whether samples are pictures without being decoded."""
    return are_pictures(model.image_shape) and not facts.autoencoder


def code_of_use(name: str, model: GenerativeModel, facts: Facts) -> str:
    """Return the Python code that loads and samples the model.

    Args:
        name: name of the folder that holds the model.
        model: the model.
        facts: facts of its training; they have the options of a network that is not from lit_knn.
    """
    lines = ["import lit_knn"]
    net = ""
    if model.description()["architecture"] is None:
        kind = type(model.net)
        options = []
        for option, value in network_options(facts).items():
            options.append(f"{option}={value!r}")
        package = f"from {kind.__module__} import {kind.__qualname__}"
        lines.append(f"{package}  # not in this folder: its authors have it")
        net = f", net={kind.__qualname__}({', '.join(options)})"

    shape = ", ".join(map(str, model.image_shape))
    space = "model space" if draws_pictures(model, facts) else "as the training data"
    lines.append("")
    lines.append(f'model = lit_knn.load("{name}"{net})  # the folder of this card')
    lines.append(f"samples = model.sample(seeds=range(16))  # (16, {shape}) float32, {space}")
    return "\n".join(lines)


def network_options(facts: Facts) -> Mapping[str, object]:
    """Return the options of the network from the run's configuration; none if it is not known."""
    return options_in(option_of(facts.config.get("model"), "net"))


def meaning_of_samples(model: GenerativeModel, facts: Facts) -> str:
    """Return sentences on what the numbers of a sample mean, and on how to choose a class."""
    words = "If the training data were latents, decode the samples with their autoencoder."
    if facts.autoencoder:
        decoder = printable(facts.autoencoder)
        words = f"Samples are latents, not images: decode them with the training's `{decoder}`."
    elif are_pictures(model.image_shape):
        words = "Pixels p from 0 to 255 are p / 127.5 - 1 in model space."

    if model.num_classes:
        by_name = " by number or name (`model.class_names`)" if model.class_names else ""
        words += " The model is class-conditional: `class_label` chooses one of "
        words += f"{model.num_classes} classes{by_name}; without it the seed does."
    return words


def metrics_table(facts: Facts) -> str:
    """Return a Markdown table of the last measurements of the training until these weights, or a sentence."""
    if not facts.metrics:
        return "No measurement of these weights was found."

    rows = [["metric", "value", "measured at images seen"]]
    for name, (seen, value) in facts.metrics.items():
        rows.append([printable(TITLES.get(name, name)), f"{value:.6g}", f"{seen:,}"])
    lines = [*table(rows), "", f"The weights have seen {facts.images_seen:,} images."]
    return "\n".join(lines)


def training_facts(facts: Facts) -> Mapping[str, object]:
    """Return the known facts of the training by name, without metrics and configuration, which have sections."""
    known = {name: value for name, value in asdict(facts).items() if value}
    for section in ("metrics", "config"):
        known.pop(section, None)
    if "images" in facts.data:
        known["data"]["images"] = images_without_mirrored(facts.data)
    return known


def yaml_section(title: str, values: Mapping[str, object]) -> str:
    """Return a section of the card that shows plain values as YAML."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    # Three backticks in a value would end the block of code.
    text = text.replace("```", "'''")
    return f"\n## {title}\n\n```yaml\n{text}```\n"
