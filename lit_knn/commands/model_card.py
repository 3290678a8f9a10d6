"""The model card of an exported model: collects what is known of its training, and writes it as Markdown."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_knn.commands.report_page import table
from lit_knn.commands.report_runs import read_average, read_distances
from lit_knn.common.errors import printable
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import TITLES
from lit_knn.runs.checkpoints import AVERAGE_KEY
from lit_knn.runs.folder import CONFIG_NAME, RunFolder
from lit_knn.runs.record import RECORD_NAME, read_record
from lit_knn.runs.resumption import RUN_KEY
from lit_knn.sampling import GenerativeModel

# The other parts of a configuration, and the trainer's other options, do not change the weights.
PARTS = ("seed_everything", "model", "data", "trainer")
OF_THE_TRAINER = (
    "max_steps",
    "precision",
    "devices",
    "num_nodes",
    "accumulate_grad_batches",
    "gradient_clip_val",
)
# These facts of the data are in a checkpoint; the card gives them these names.
OF_THE_DATA = {
    "images": "images",
    "data": "hash",
    "shards": "hash of the shards",
    "labels": "hash of the labels",
}
TAGS = {
    "consistency": ["consistency-model"],
    "diffusion": ["diffusion-model", "edm"],
    "flow": ["flow-matching"],
    "mean_flow": ["flow-matching", "meanflow"],
}


@dataclass(frozen=True)
class Facts:
    """Facts of a training for its model card, as plain values; an unknown one is empty."""

    steps: int
    images_seen: int
    hours: float  # of the training steps, without validations
    hardware: list[str]
    # number and hash of the images, and with a record class, shape and fingerprint of the data
    data: dict[str, Any]
    # the last (images seen, value) that was measured up to these weights
    metrics: dict[str, tuple[int, float]]
    versions: dict[str, str]
    # the parts of config.yaml that make the weights, without paths of the machine
    config: dict[str, Any]
    autoencoder: str = ""  # the class that decodes the samples, if they are latents


def collect(checkpoint: Mapping[Any, Any], file: Path) -> Facts:
    """Collect the available facts of a checkpoint from its content, and from the run folder that holds its file."""
    run = file.resolve().parent.parent
    time, found = checkpoint.get("training_time") or {}, checkpoint.get(RUN_KEY) or {}
    steps, seen = int(checkpoint.get("global_step", 0)), int(checkpoint.get("images_seen", 0))
    hours, hardware = float(time.get("seconds", 0)) / 3600, list(time.get("hardware", ()))
    data = {name: found[key] for key, name in OF_THE_DATA.items() if key in found}
    versions: dict[str, str] = {}
    parts = [run]
    if (run / RECORD_NAME).is_file():
        record = read_record(run)
        data = {**record.data, **data}
        versions = {"python": record.python, **record.packages, "revision": record.revision or "-"}
        parts = RunFolder(run).parts()
    # The tables of a run are measured with its usual average.
    own = checkpoint.get(AVERAGE_KEY)
    distances = read_average(file.parent, own["length"]) if own else read_distances(parts)
    measured = {name: [p for p in points if p[0] <= seen] for name, points in distances.items()}
    metrics = {name: points[-1] for name, points in measured.items() if points}
    config = RunFolder(run).config() if (run / CONFIG_NAME).is_file() else {}
    settings = without_paths({name: config[name] for name in PARTS if name in config})
    if trainer := settings.get("trainer"):
        settings["trainer"] = {name: trainer[name] for name in OF_THE_TRAINER if name in trainer}
    decoder = _autoencoder(found, settings)
    return Facts(steps, seen, hours, hardware, data, metrics, versions, settings, decoder)


def _autoencoder(run: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the class of the autoencoder of a training, with its path if it is known; "" for none."""
    if "autoencoder" not in run:
        return ""

    data = settings.get("data") or {}
    coder = (data.get("init_args") or {}).get("autoencoder")
    if isinstance(coder, dict) and "class_path" in coder:
        return str(coder["class_path"])

    return str(json.loads(run["autoencoder"])["autoencoder"])


def without_paths(value: Any) -> Any:
    """Replace each option that is an absolute path by its last part, so that the card does not describe the machine."""
    if isinstance(value, dict):
        return {name: without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(value).name if is_path else value


def model_card(name: str, model: GenerativeModel, facts: Facts) -> str:
    """Write the card of a model; `name` is that of the folder that holds it."""
    name = printable(name)
    lines = ["---", *_front_matter(model, facts), "---", "", f"# {name}", ""]
    lines += [f"`{model!r}`, trained with lit_knn.", ""]
    lines += [
        "## Use",
        "",
        *_use(name, model, facts),
        "",
        "## Network",
        "",
        *_network(model, facts),
        "",
    ]
    lines += ["## Training", "", *_training(facts), ""]
    lines += ["## Metrics", "", *_metrics(facts), ""]
    if facts.config:
        text = yaml.safe_dump(facts.config, sort_keys=False, allow_unicode=True)
        lines += [
            "## Configuration",
            "",
            "```yaml",
            *text.replace("```", "'''").splitlines(),
            "```",
            "",
        ]
    return "\n".join(lines)


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
    shape = ", ".join(map(str, model.image_shape))
    class_path, net = own_class(model), ""
    imports = ["import lit_knn"]
    if class_path:
        package, _, kind = class_path.rpartition(".")
        imports.append(f"from {package} import {kind}  # not in this folder: its authors have it")
        options = [f"{option}={value!r}" for option, value in _own_options(facts).items()]
        net = f", net={kind}({', '.join(options)})"

    lines = [
        "```python",
        *imports,
        "",
        f'model = lit_knn.load("{name}"{net})  # the folder of this card',
        f"samples = model.sample(seeds=range(16))  # (16, {shape}) float32, {_space(model, facts)}",
        "```",
        "",
        "A sample depends on its seed alone.",
    ]
    lines[-1] += f" {_meaning(model, facts)}"
    if model.num_classes:
        by_name = " by number or name (`model.class_names`)" if model.class_names else ""
        lines[-1] += (
            f" The model is class-conditional: `class_label` chooses one of {model.num_classes} classes"
        )
        lines[-1] += f"{by_name}; without it the seed does."

    return lines


def own_class(model: GenerativeModel) -> str:
    """Return the class path of a network that lit_knn does not have; "" for our own networks."""
    if model.description()["architecture"] is not None:
        return ""

    kind = type(model.net)
    return f"{kind.__module__}.{kind.__qualname__}"


def _own_options(facts: Facts) -> dict[str, Any]:
    """Return the options of the network in the configuration of the run, as far as it is known."""
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
    architecture = model.description()["architecture"]
    if architecture is None:
        architecture = {"class": own_class(model), "options": _own_options(facts)}
    options = {"class": architecture["class"], **architecture["options"], **model.options()}
    rows = [[name, printable(str(value))] for name, value in options.items()]

    return table([["option", "value"], *rows])


def _training(facts: Facts) -> list[str]:
    model = facts.config.get("model") or {}
    estimator = (model.get("init_args") or {}).get("estimator") or {}
    rows = {
        "": "",
        "trained by": model.get("class_path", "-"),
        "target estimated by": estimator.get("class_path", "-"),
        "optimiser steps": f"{facts.steps:,}",
        "images seen": f"{facts.images_seen:,}",
        "time": f"{facts.hours:.3g} hours, without validations" if facts.hours else "-",
        "hardware": "; ".join(facts.hardware) or "-",
        **{f"data: {name}": value for name, value in facts.data.items()},
        **facts.versions,
    }
    return [printable(line) for line in table([[name, str(value)] for name, value in rows.items()])]


def _metrics(facts: Facts) -> list[str]:
    if not facts.metrics:
        return ["No measurement of these weights was found."]
    rows = [["metric", "value", "measured at images seen"]]
    for name, (seen, value) in facts.metrics.items():
        rows.append([TITLES.get(name, name), f"{value:.6g}", f"{seen:,}"])
    return [
        *(printable(line) for line in table(rows)),
        "",
        f"The weights have seen {facts.images_seen:,} images.",
    ]
