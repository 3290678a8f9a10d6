"""Wheels, source distributions and editable installations, of a clone and of an archive, which has no links."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.util import find_spec

import pytest

from lit_knn.commands.cli import packaged_configs
from tests import ROOT

# These folders of a checkout are packages in `lit_knn`.
BESIDE = ("callbacks", "configs")
NO_CACHE = shutil.ignore_patterns("__pycache__")
WITHOUT_BESIDE = shutil.ignore_patterns("__pycache__", *BESIDE)
# With -I and -S Python has neither packages nor a current folder. This adds the folder with the project or its
# installation, and then the packages of this Python, without an installation of the project that it may have.
START = "import site, sys; site.addsitedir(sys.argv.pop(1)); sys.path += sys.argv.pop(1).split(':')"
PACKAGES = ":".join(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
FIND = "from importlib.util import find_spec; print(find_spec('lit_knn.callbacks').origin)"
MAIN = "from lit_knn.commands.entry import main; main(sys.argv[1:])"


def checkout(folder, links):
    """Make a copy of the project, because a build leaves files behind."""
    for name in BESIDE:
        shutil.copytree(ROOT / name, folder / name, ignore=NO_CACHE)

    shutil.copytree(ROOT / "lit_knn", folder / "lit_knn", ignore=WITHOUT_BESIDE)

    for name in ("pyproject.toml", "README.md", "LICENSE", "main.py"):
        shutil.copy(ROOT / name, folder)

    for name in BESIDE:
        link = folder / "lit_knn" / name

        if links:
            link.symlink_to(f"../{name}")
        else:  # Python's zipfile extracts a link as a file that names its target.
            link.write_text(f"../{name}")

    return folder


def built(kind, source, folder):
    """Build a wheel, an editable wheel or a source distribution (`sdist`) into a new folder, and return its path."""
    folder.mkdir()
    code = (
        f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, folder]
    subprocess.run(command, cwd=source, capture_output=True, check=True)
    (path,) = folder.iterdir()
    return path


def files_of(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def printed(project, *code, args=(), cwd=None, status=0):
    """Run lines of code with the project of this folder, and return the lines that they print."""
    lines = "\n".join([START, *code])
    command = [sys.executable, "-I", "-S", "-c", lines, project, PACKAGES, *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return (done.stdout + done.stderr).splitlines()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return checkout(tmp_path_factory.mktemp("archive"), links=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return checkout(tmp_path_factory.mktemp("clone"), links=True)


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    return built("wheel", archive, tmp_path_factory.mktemp("built") / "wheel")


def test_the_wheel_of_an_archive_has_every_file_and_no_other(wheel):
    expected = set()

    for path in (ROOT / "lit_knn").rglob("*"):
        if path.is_file() and path.name not in BESIDE and path.suffix != ".pyc":
            expected.add(path.relative_to(ROOT).as_posix())

    for pattern in ("callbacks/*.py", "configs/**/*.yaml"):
        for path in ROOT.glob(pattern):
            expected.add(f"lit_knn/{path.relative_to(ROOT).as_posix()}")

    files = files_of(wheel)
    assert files == expected
    assert {"lit_knn/py.typed", "lit_knn/configs/demo.yaml"} <= files


def test_wheels_of_a_clone_and_an_sdist_have_the_same_files(wheel, clone, tmp_path):
    assert files_of(built("wheel", clone, tmp_path / "wheel")) == files_of(wheel)

    shutil.unpack_archive(
        built("sdist", clone, tmp_path / "sdist"), tmp_path / "unpacked", filter="data"
    )
    (source,) = (tmp_path / "unpacked").iterdir()
    assert files_of(built("wheel", source, tmp_path / "from_sdist")) == files_of(wheel)


def test_an_installed_wheel_finds_its_configs(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from lit_knn.commands.cli import packaged_configs as p; print(p.folder(), *p.names(), sep='\\n')"
    assert printed(tmp_path, code) == [
        str(tmp_path / "lit_knn" / "configs"),
        *packaged_configs.names(),
    ]


def test_an_editable_installation_of_an_archive_trains(archive, tmp_path):
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    zipfile.ZipFile(built("editable", archive, tmp_path / "wheel")).extractall(installed)
    two_steps = [
        "--trainer.max_steps",
        "2",
        "-c",
        str(ROOT / "tests" / "tiny.yaml"),
        "--model.net.channels",
        "8",
    ]
    lines = printed(installed, FIND, MAIN, args=["fit", "-c", "demo", *two_steps], cwd=work)
    assert lines[0] == str(archive / "callbacks" / "__init__.py")
    assert (work / "runs" / "demo" / "knn_0" / "checkpoints" / "last.ckpt").is_file()


def test_an_unpacked_archive_runs_without_installation(archive):
    # `prepare` reads configs before anything else, and imports little.
    lines = printed(archive, FIND, MAIN, args=["prepare", "-c", "dem"], status=2)
    assert lines == [
        str(archive / "callbacks" / "__init__.py"),
        "error: --config dem: no such file; did you mean demo?",
    ]


def test_a_copy_of_lit_knn_alone_says_what_to_do(archive, tmp_path):
    shutil.copytree(archive / "lit_knn", tmp_path / "lit_knn", ignore=WITHOUT_BESIDE)
    advice = (
        "install the project with pip, or keep its folders callbacks and configs beside lit_knn"
    )
    lines = printed(tmp_path, MAIN, args=["prepare", "-c", "demo"], status=2)
    assert lines == [f"error: the configs of lit_knn are missing; {advice}"]
    # `fit` ends so, too, but imports Lightning first.
    code = "from lit_knn.common.one_line import errors_in_one_line\nwith errors_in_one_line(): import lit_knn.callbacks"
    assert printed(tmp_path, code, status=2) == [f"error: lit_knn.callbacks is missing; {advice}"]


def test_every_package_is_named_once():
    names = ["lit_knn.callbacks", "lit_knn.configs"]

    for path in (ROOT / "lit_knn").rglob("__init__.py"):
        names.append(".".join(path.parent.relative_to(ROOT).parts))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"] == sorted(names)


@pytest.mark.skipif(not find_spec("mypy"), reason="needs mypy")
def test_mypy_finds_the_callbacks(clone):
    options = ["--config-file=", "--cache-dir", os.devnull, "--follow-imports", "skip"]
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options,
        "-c",
        "from lit_knn.callbacks import Fidelity",
    ]
    subprocess.run(command, cwd=clone, check=True)
