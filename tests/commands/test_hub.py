"""Models go to the Hub and come back: by a stand-in of its end point on the loopback address."""

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import lit_knn
from lit_knn.commands.export import export
from lit_knn.common.errors import InputError
from main import main
from tests.command_lines import refusal_of
from tests.hub_stand_in import Hub, commit_hash
from tests.networks import write_own

NAME, ADDRESS = "lena/digits", "hf://lena/digits"
FILES = {"README.md", "config.json", "model.safetensors"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stand-in, a token that may write, and an empty cache."""
    hub = Hub()
    use(hub.address, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.close()


def use(address, monkeypatch):
    """Give the library another address, as HF_ENDPOINT does at the start of a process."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def pushed(hub, capsys):
    """A model on the Hub, private, and its folder `out`."""
    write_own("a.ckpt")
    main(["export", "a.ckpt", "out", "--push", NAME, "--private"])
    printed = capsys.readouterr().out
    assert f"Pushed: {hub.address}/{NAME}\n" in printed
    assert f'lit_knn.load("{ADDRESS}")' in printed
    return hub


def test_pushed_model_is_loaded_from_the_hub_then_from_the_cache(pushed, monkeypatch, capsys):
    assert pushed.models[NAME]["private"]
    (files,) = pushed.models[NAME]["commits"]
    assert set(files) == FILES
    expected = lit_knn.load("out").sample([0, 1])
    assert torch.equal(lit_knn.load(ADDRESS).sample([0, 1]), expected)

    # The same without network, and without a word about it.
    pushed.close()
    capsys.readouterr()
    assert torch.equal(lit_knn.load(ADDRESS).sample([0, 1]), expected)
    assert capsys.readouterr() == ("", "")


def test_example_of_the_card_on_the_hub_works_there(pushed):
    (files,) = pushed.models[NAME]["commits"]
    card = files["README.md"].decode()
    local = Path("out/README.md").read_text()
    assert 'lit_knn.load("out")  # the folder of this card' in local
    changed = [line for line in card.splitlines() if line not in local.splitlines()]
    (line,) = changed
    assert line == f'model = lit_knn.load("{ADDRESS}")  # needs: pip install "lit_knn[hub]"'
    names = {"lit_knn": lit_knn}
    exec(line, names)
    assert names["model"].image_shape == (1, 8, 8)


def test_revision_chooses_among_pushed_models(pushed):
    first = lit_knn.load(ADDRESS).sample([0])
    export(write_own("b.ckpt", seed=1), "other")
    # What the user wrote into the card is uploaded, too.
    card = Path("other/README.md")
    card.write_text(card.read_text().replace("---\n", "---\nlicense: cc-by-4.0\n", 1))
    main(["export", "other", "--push", NAME])

    commits = pushed.models[NAME]["commits"]
    assert len(commits) == 2
    assert b"\nlicense: cc-by-4.0\n" in commits[1]["README.md"]
    assert torch.equal(lit_knn.load(f"{ADDRESS}@{commit_hash(0)}").sample([0]), first)
    latest = lit_knn.load(ADDRESS).sample([0])
    assert torch.equal(latest, lit_knn.load("other").sample([0]))
    assert not torch.equal(latest, first)


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        ("hf_none", NAME, "the Hub refuses the token, which is wrong or has expired: log in"),
        ("hf_reads", NAME, "the token of lena may only read: log in with `hf auth login`"),
        ("", NAME, "no token for the Hub: log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_writes", "digits", "a model of the Hub is user/name"),
        ("hf_writes", "lena/a/b", "a model of the Hub is user/name"),
        ("hf_writes", "lena/my digits", "a model of the Hub is user/name"),
    ],
)
def test_bad_push_is_refused_before_the_export(token, name, words, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", token)
    write_own("a.ckpt")
    line = refusal_of(["export", "a.ckpt", "out", "--push", name], capsys)
    assert line.startswith(f"error: --push {name}: {words}")
    assert not Path("out").exists()
    assert not hub.models


def test_refused_upload_keeps_the_export_and_can_be_repeated(hub, capsys):
    write_own("a.ckpt")
    line = refusal_of(["export", "a.ckpt", "out", "--push", "emil/digits"], capsys)
    assert "--push emil/digits: the token has no right to do this: log in" in line
    assert {path.name for path in Path("out").iterdir()} == FILES
    main(["export", "a.ckpt", "out", "--push", NAME])
    main(["export", "out", "--push", NAME])
    assert len(hub.models[NAME]["commits"]) == 2
    assert not hub.models[NAME]["private"]


def test_a_folder_that_was_not_exported_is_not_pushed(hub, capsys):
    Path("empty").mkdir()
    line = refusal_of(["export", "empty", "--push", NAME], capsys)
    assert line.startswith("error: export: empty has no model.safetensors: give RUN and FOLDER")
    line = refusal_of(["export", "a.ckpt", "out", "--private"], capsys)
    assert "--private is for --push" in line
    line = refusal_of(["export", "empty"], capsys)
    assert line == "error: export: give FOLDER, where the files go"
    assert not hub.models


@pytest.fixture
def _quiet_library():
    """Mute what the library says of its retries: its handler holds the stream of another test."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel("ERROR")
    yield
    logger.setLevel(level)


def assert_no_load(address, words):
    with pytest.raises(InputError) as refusal:
        lit_knn.load(address)
    assert str(refusal.value).startswith("hf://")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_loading_says_what_is_wrong_with_model_or_token(pushed, monkeypatch):
    assert_no_load("hf://digits", "a model of the Hub is user/name")
    assert_no_load(f"{ADDRESS}@", "after @ comes a branch, a tag or a commit")
    assert_no_load(f"{ADDRESS}@v2", "the model has no such branch, tag or commit")
    assert_no_load(
        "hf://lena/letters", "no such model, or it is private: check the name, or log in"
    )
    for token, words in (("", "no such model, or it is private"), ("hf_none", "refuses the token")):
        monkeypatch.setenv("HF_TOKEN", token)
        assert_no_load(ADDRESS, words)

    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    pushed.models[NAME]["gated"] = True
    assert_no_load(ADDRESS, "access must be asked for on its page of the Hub")
    pushed.models[NAME] = {"private": False, "gated": False, "commits": [{"README.md": b"other"}]}
    assert_no_load(ADDRESS, "no model that `lit-knn export` wrote: it has no model.safetensors")


@pytest.mark.usefixtures("_quiet_library")
def test_without_network_or_package_one_line_says_so(hub, monkeypatch, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
    use(closed, monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's retries
    words = f"no answer from {closed}: check the network, a proxy or HF_ENDPOINT"
    assert_no_load(ADDRESS, words)
    write_own("a.ckpt")
    assert words in refusal_of(["export", "a.ckpt", "out", "--push", NAME], capsys)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_no_load(ADDRESS, "not in the cache, and HF_HUB_OFFLINE forbids a download")

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = "huggingface_hub is not installed: pip install 'lit_knn[hub]'"
    assert_no_load(ADDRESS, words)
    assert words in refusal_of(["export", "a.ckpt", "out", "--push", NAME], capsys)
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_process_that_only_loads_needs_no_lightning(pushed, monkeypatch):
    code = f"""
import sys, lit_knn
print(lit_knn.load("{ADDRESS}").image_shape)
assert not {{"pytorch_lightning", "faiss", "jsonargparse", "diffusers"}} & set(sys.modules)
"""
    for name, value in (("HF_ENDPOINT", pushed.address), ("HF_HOME", "fresh")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(lit_knn.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(1, 8, 8)\n"), done.stderr
