"""Models on the Hugging Face Hub: their addresses, downloads, and errors in one line. It needs the extra `hub`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_knn.common.errors import InputError, causes, first_line
from lit_knn.common.extras import missing

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

# A `Path` has one slash in place of two.
ADDRESS = re.compile(r"hf:/{1,2}(?P<name>[^@]*)(@(?P<revision>.*))?")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class HubModel(NamedTuple):
    """A model on the Hub."""

    name: str  # user/name
    revision: str | None  # a branch, tag or commit; None for the main branch


def hub_model(path: str | os.PathLike[str]) -> HubModel | None:
    """Return the model that a path such as `hf://user/name@revision` names; None for a path of this machine.

    Raises InputError if the name or the revision cannot be one.
    """
    address = os.fspath(path)
    match = ADDRESS.fullmatch(address)
    if match is None:
        return None

    check_name(match["name"], address)
    if match["revision"] == "":
        raise InputError(f"{address}: after @ comes a branch, a tag or a commit")
    return HubModel(match["name"], match["revision"])


def check_name(name: str, owner: str) -> None:
    """Raise InputError if no model of the Hub can have this name.

    Args:
        name: the name with its user or organisation.
        owner: the option or address that has the name, for the message.
    """
    with hub_errors(owner):
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
            valid = "/" in name
        except HFValidationError:
            valid = False

    if not valid:
        rule = "a model of the Hub is user/name, of letters, digits, '-', '_' and '.'"
        raise InputError(f"{owner}: {rule}, got {name!r:.80}")


def download(model: HubModel, file_name: str) -> Path:
    """Return the path of a model's file in the cache of `huggingface_hub`; download it if there is a newer one.

    Without a network this is the file that was downloaded last.

    Raises:
        InputError: one line on the token, the network or the model.
    """
    with hub_errors(f"hf://{model.name}"):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model.name, file_name, revision=model.revision))


@contextmanager
def hub_errors(owner: str) -> Iterator[None]:
    """Turn errors of the Hub and of the connection to it into an InputError, also that the package is not installed.

    Args:
        owner: the option or address that names the model, for the message.
    """
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(f"{owner}: {missing(error) or first_line(error)}") from error
    except Exception as error:
        advice = _advice(error)
        if advice is None:
            raise
        raise InputError(f"{owner}: {advice}") from error


def _advice(error: Exception) -> str | None:
    """Say in one line what an error of `huggingface_hub` means, and what to do; None for an error of another kind."""
    from huggingface_hub import constants, errors

    # A file that is not in the cache has the answer of the Hub as the cause of its error.
    for cause in causes(error):
        if isinstance(cause, errors.HfHubHTTPError):
            return _advice_on_answer(cause)

    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"no token for the Hub: {LOG_IN}"
    if constants.HF_HUB_OFFLINE:
        return "not in the cache, and HF_HUB_OFFLINE forbids a download"

    # The library for connections differs between versions.
    library = type(error).__module__.partition(".")[0]
    no_answer = (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)
    if isinstance(error, no_answer) or library in ("httpx", "httpx2", "requests"):
        return f"no answer from {constants.ENDPOINT}: check the network, a proxy or HF_ENDPOINT"
    return None


def _advice_on_answer(answer: "HfHubHTTPError") -> str:
    """Say in one line what an answer of the Hub means, and what to do."""
    from huggingface_hub import errors, get_token

    status = answer.response.status_code
    if isinstance(answer, errors.GatedRepoError):
        return f"access must be asked for on its page of the Hub; then {LOG_IN}"
    # Without a token the Hub answers so for missing models, too.
    if isinstance(answer, errors.RepositoryNotFoundError) or (status == 401 and not get_token()):
        return f"the Hub has no such model, or it is private: check the name, or {LOG_IN}"
    if isinstance(answer, errors.RevisionNotFoundError):
        return "the model has no such branch, tag or commit"
    if isinstance(answer, errors.EntryNotFoundError):
        return "this is no model that `lit-knn export` wrote: it has no model.safetensors"

    if status == 401:
        return f"the Hub refuses the token, which is wrong or has expired: {LOG_IN}"
    if status == 403:
        return f"the token has no right to do this: {LOG_IN} to one that has it"
    return f"the Hub answers {status}: {first_line(answer):.200}"
