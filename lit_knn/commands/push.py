"""Uploads an exported model to the Hugging Face Hub, for `lit-knn export --push`."""

import os
import re
from pathlib import Path

from lit_knn.commands.model_card import CARD_NAME
from lit_knn.common.errors import InputError
from lit_knn.common.hub import LOG_IN, check_name, hub_errors
from lit_knn.sampling.model_files import CONFIG_NAME, WEIGHTS_NAME

# The line of a model card that loads the model from its folder.
LOAD = re.compile(r'lit_knn\.load\("[^"]*"(.*)\)  # the folder of this card')


def check_push(name: str) -> None:
    """Raise InputError if a model cannot be uploaded under this name: before the work of an export.

    Args:
        name: the name with its user or organisation.
    """
    owner = f"--push {name}"
    check_name(name, owner)
    with hub_errors(owner):
        from huggingface_hub import HfApi

        user = HfApi().whoami()

    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        problem = f"the token of {user['name']} may only read"
        raise InputError(f"{owner}: {problem}: {LOG_IN} to one that may write")


def check_exported(folder: Path) -> None:
    """Raise InputError if a folder has not the three files that `lit-knn export` writes."""
    for file_name in (WEIGHTS_NAME, CONFIG_NAME, CARD_NAME):
        if not (folder / file_name).is_file():
            advice = "give RUN and FOLDER, or the folder of an export alone with --push"
            raise InputError(f"export: {folder} has no {file_name}: {advice}")


def push(folder: str | os.PathLike[str], name: str, private: bool = False) -> str:
    """Upload the three files of an exported model in one commit, and return the address of its page.

    In the card of the Hub, the line that loads the model names the Hub. Everything else is as in the folder, also what
    was written into the card by hand.

    Args:
        folder: a folder that `lit-knn export` wrote.
        name: the name with its user or organisation; the model is made there if needed.
        private: whether a new model is private. It changes none that is there.
    """
    folder = Path(folder)
    check_exported(folder)
    card = (folder / CARD_NAME).read_text(encoding="utf-8")

    with hub_errors(f"--push {name}"):
        from huggingface_hub import CommitOperationAdd, HfApi

        hub = HfApi()
        page = hub.create_repo(name, private=private or None, exist_ok=True)
        files = [
            CommitOperationAdd(WEIGHTS_NAME, str(folder / WEIGHTS_NAME)),
            CommitOperationAdd(CONFIG_NAME, str(folder / CONFIG_NAME)),
            CommitOperationAdd(CARD_NAME, card_of_hub(card, name).encode()),
        ]
        hub.create_commit(name, files, commit_message="Upload a model of lit_knn")
    return str(page)


def card_of_hub(card: str, name: str) -> str:
    """Return the text of a card whose example loads the model `name` of the Hub."""
    loads = rf'lit_knn.load("hf://{name}"\1)  # needs: pip install "lit_knn[hub]"'
    return LOAD.sub(loads, card, count=1)
