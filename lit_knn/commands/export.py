"""`lit-knn export RUN FOLDER` writes the model of a run for others: safetensors, configuration, model card.

With `--push user/name` it also uploads them to the Hugging Face Hub.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from lit_knn.commands.model_card import CARD_NAME, model_card
from lit_knn.commands.own_network import import_from_current_folder, network_of_run
from lit_knn.commands.push import check_exported, check_push, push
from lit_knn.commands.training_facts import facts_of_training
from lit_knn.common.checkpoint_file import MODEL_KEY, read_checkpoint_file
from lit_knn.common.errors import InputError, prefixed
from lit_knn.common.extras import is_installed
from lit_knn.common.files import written_whole
from lit_knn.runs.folder import run_of
from lit_knn.sampling import GenerativeModel
from lit_knn.sampling.loading import load
from lit_knn.sampling.model_files import (
    CONFIG_NAME,
    FORMAT,
    VERSION,
    WEIGHTS_NAME,
    find_file,
    read_exported,
    write_exported,
)


def export(
    source: str | PathLike[str], folder: str | PathLike[str], net: nn.Module | None = None
) -> GenerativeModel:
    """Write the model of a run into a folder that `lit_knn.load` reads: weights, configuration and model card.

    Args:
        source: the folder of a training run, or a checkpoint. The averaged weights are written.
        folder: where the three files go; it is made if needed. No file is overwritten; files of an export that was
            interrupted are kept if they are the same.
        net: the raw network, without preconditioning, if its class is not from `lit_knn.nets`. With None, it is made
            as the run's config.yaml says, which runs code of the user. Whoever loads the folder needs the class, too.

    Returns:
        The model that was written.
    """
    source = Path(source)
    folder = Path(folder)
    # If the source is the folder of a run, this is its last checkpoint.
    file = find_file(source)
    if file.suffix != ".ckpt":
        raise InputError(
            f"export: {source} must be the folder of a training run or a checkpoint (.ckpt)"
        )

    checkpoint = read_checkpoint_file(file, mmap=True)
    if net is None and has_foreign_network(checkpoint):
        net = network_of_run(run_of(file))
    model = load(file, net)
    with prefixed(str(file)):
        facts = facts_of_training(checkpoint, file)

    config = {
        "library_name": "lit_knn",
        "format": FORMAT,
        "format_version": VERSION,
        "model": model.description(),
        "training": asdict(facts),
    }
    config_text = json.dumps(config, indent=2) + "\n"
    card = model_card(folder.resolve().name, model, facts)

    weights = folder / WEIGHTS_NAME
    texts = {folder / CONFIG_NAME: config_text, folder / CARD_NAME: card}
    _check_existing(weights, model, texts)

    # The weights, the largest file, are written first, so that nothing is left behind if the disk is full.
    if not weights.exists():
        write_exported(weights, model)
    for path, text in texts.items():
        if not path.exists():
            with written_whole(path) as partial:
                partial.write_text(text, encoding="utf-8")
    return model


def _check_existing(weights: Path, model: GenerativeModel, texts: Mapping[Path, str]) -> None:
    """Raise InputError if a file of another export exists; equal files are those of an interrupted export.

    Args:
        weights: path of the file of weights.
        model: the model to export.
        texts: the text of each other file, by its path.
    """
    other = []
    if weights.exists() and not _holds(weights, model):
        other.append(weights)
    for path, text in texts.items():
        if path.exists() and path.read_bytes() != text.encode():
            other.append(path)

    if other:
        problem = f"{other[0]} is there already"
        raise InputError(f"export: {problem}; nothing is overwritten, use another folder")


def has_foreign_network(checkpoint: Mapping[str, object]) -> bool:
    """Return whether the class of a checkpoint's network is not one of lit_knn."""
    description = checkpoint.get(MODEL_KEY)
    return isinstance(description, dict) and description.get("architecture") is None


def _holds(path: Path, model: GenerativeModel) -> bool:
    """Return whether an exported file has the weights and the description of this model."""
    try:
        description, weights = read_exported(path)
    except InputError:
        return False

    # By way of JSON, the model's description gets lists for tuples, as the one from the file has them.
    state = model.net.state_dict()
    same_model = description == json.loads(json.dumps(model.description()))
    if not same_model or weights.keys() != state.keys():
        return False
    return all(torch.equal(value, state[name]) for name, value in weights.items())


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn export` with the arguments of a command line."""
    options = _parser().parse_args(args)
    if options.folder is None and options.push is None:
        raise InputError("export: give FOLDER, where the files go")

    if options.push is not None:
        check_push(options.push)
    elif options.private:
        raise InputError("export: --private is for --push USER/NAME")
    folder = options.folder
    if folder is None:
        folder = options.source
        check_exported(Path(folder))
    else:
        _export_by_command(options.source, folder, options.net)

    if options.push is not None:
        page = push(folder, options.push, options.private)
        print(f'Pushed: {page}\nTo load it: lit_knn.load("hf://{options.push}")')


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `lit-knn export`."""
    about = "Write a trained model for others: weights as safetensors, a configuration and a model card."
    parser = argparse.ArgumentParser(prog="lit-knn export", description=about)
    about = "folder of a training run, such as runs/demo/knn_0, or a .ckpt; "
    about += "to push what was exported before: its folder alone"
    parser.add_argument("source", metavar="RUN", help=about)
    about = "folder of the three files; none of them is overwritten"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=about)
    about = "class path of a network of your own, or YAML with its class_path and init_args; "
    about += "by default the one in the config.yaml of the run"
    parser.add_argument("--net", metavar="CLASS", help=about)
    about = "also upload the three files to the Hugging Face Hub, as the next commit of this model"
    parser.add_argument("--push", metavar="USER/NAME", help=about)
    about = "make the model private, if --push makes a new one"
    parser.add_argument("--private", action="store_true", help=about)
    return parser


def _export_by_command(source: str, folder: str, net_text: str | None) -> None:
    """Export a run, and print what was written.

    Args:
        source: see `export`.
        folder: see `export`.
        net_text: the option `--net`, or None.
    """
    import_from_current_folder()  # The class of the user's network may be in a file there.
    net = None
    if net_text is not None:
        net = network_of_run(run_of(find_file(source)), net_text)

    model = export(source, folder, net)
    print(f"{model!r}\nExported: {folder}/{{{WEIGHTS_NAME}, {CONFIG_NAME}, {CARD_NAME}}}")
    if not is_installed("huggingface_hub"):
        reason = "has no front matter for the Hugging Face Hub"
        print(f"{CARD_NAME} {reason}, which needs: pip install 'lit_knn[hub]'")
