"""Plants known faults in a copy of the project, one at a time, and tells which of them the tests do not notice.

    python -m tests.mutate                     # all faults of tests/faults/*.yaml
    python -m tests.mutate theory snis         # the faults whose list, file or description contains one of the words

Each entry of a list has the keys `file`, `fault` (what is wrong, in one line), `old` (code that the file has once),
`new`, `tests` (arguments of pytest) and perhaps `function` (where `old` is, if the file has it more than once; a method
is `Class.name`) and `harmless` (why no test should notice). Where lines break does not matter: code is found by its
tokens.
"""

import argparse
import ast
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LISTS = ROOT / "tests" / "faults"
# One process imports these packages, and every run of the tests is its fork. None of them imports the project.
PRELOADED = [
    "torch",
    "pytorch_lightning",
    "faiss",
    "torchmetrics",
    "torchvision",
    "matplotlib.pyplot",
    "jsonargparse",
]
PRELOADED += ["pytest", "scipy.stats", "sklearn.datasets", "torch.utils.tensorboard"]
CAUGHT, SURVIVED, UNUSABLE = "caught", "survived", "unusable"
# Exit status of pytest: passed; an internal error, wrong options, or no test, which means that no test has judged the
# fault. Everything else is a failure, or the fault has ended the process.
VERDICTS = {0: SURVIVED, 3: UNUSABLE, 4: UNUSABLE, 5: UNUSABLE}
FORK = get_context("fork")


class Fault(NamedTuple):
    """A fault to plant, see the top of this file; without `old` nothing is planted."""

    file: str
    fault: str
    old: str
    new: str
    tests: str
    harmless: str = ""
    listed: str = ""
    function: str = ""

    def __str__(self) -> str:
        return f"{self.listed}: {self.file}: {self.fault}"

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault. Raises ValueError if the entry does not fit the file."""
        if not self.old:
            return text
        before, searched, after = parts_by_function(text, self.function)
        start, end = span_of(searched, self.old)
        text = before + searched[:start] + self.new + searched[end:] + after
        if self.file.endswith(".py"):
            # An error of syntax would look like a fault that was caught.
            compile(text, self.file, "exec")
        return text


def parts_by_function(text: str, name: str) -> tuple[str, str, str]:
    """Split a file into what is before a function, the function, and what is after it. The empty name is all."""
    if not name:
        return "", text, ""
    places = [node for path, node in functions(ast.parse(text)) if path == name]
    if len(places) != 1:
        raise ValueError(f"{len(places)} functions have the name {name}")
    lines = text.splitlines(keepends=True)
    start, end = places[0].lineno - 1, places[0].end_lineno
    return "".join(lines[:start]), "".join(lines[start:end]), "".join(lines[end:])


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield all functions below a node with their names, such as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        path = above
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            path = f"{above}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef):
            yield path, node
        yield from functions(node, path)


def span_of(text: str, code: str) -> tuple[int, int]:
    """Find where `text` has `code`: as it is, or else with other line breaks. Raises ValueError unless once."""
    if text.count(code) == 1:
        start = text.index(code)
        return start, start + len(code)
    places, wanted = tokens(text), [word for word, _, _ in tokens(code)]
    words = [word for word, _, _ in places]
    starts = [i for i in range(len(words)) if wanted and words[i : i + len(wanted)] == wanted]
    if len(starts) != 1:
        raise ValueError(f"`old` occurs {max(text.count(code), len(starts))} times")
    return places[starts[0]][1], places[starts[0] + len(wanted) - 1][2]


def tokens(text: str) -> list[tuple[str, int, int]]:
    """Return the tokens of a piece of Python with their places, without line breaks and commas before a bracket."""
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    places: list[tuple[str, int, int]] = []
    with suppress(tokenize.TokenError, IndentationError):  # A piece may end within brackets.
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if not token.string.strip() or token.type == tokenize.COMMENT:
                continue
            if token.string in ")]}" and places and places[-1][0] == ",":
                places.pop()
            (row, column), (last, end) = token.start, token.end
            places.append((token.string, offsets[row - 1] + column, offsets[last - 1] + end))
    return places


class Verdict(NamedTuple):
    """Tells with one of the three words how a fault ended, and why if there is a reason."""

    word: str
    why: str = ""


def read_faults(folder: Path, words: Iterable[str] = ("",)) -> list[Fault]:
    """Read the faults in all lists of a folder that contain one of the words."""
    import yaml

    lists = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.yaml"))
    }
    faults = [Fault(**entry, listed=name) for name, entries in lists.items() for entry in entries]
    return [fault for fault in faults if any(word.lower() in str(fault).lower() for word in words)]


def copy_project(root: Path, target: Path) -> None:
    """Copy the files that git tracks or would track, and compile them."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).exists():  # A link may name a folder.
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    # Python compares these files with the source's hash. A time of writing would miss a fault planted within a second.
    compiling = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "checked-hash",
        str(target),
    ]
    subprocess.run(compiling, check=False, stdout=subprocess.DEVNULL)


def run_tests(root: Path, tests: list[str], log: Path) -> None:
    """Run pytest in the project at `root`; the body of a forked process."""
    import pytest

    os.setsid()
    # A tool in the background ignores Ctrl-C, but tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(root)
    # The fork has the modules of the tree that the user works in. Processes that the tests start must not import it.
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("tests", "lit_knn", "callbacks", "main")
    ]:
        del sys.modules[name]
    sys.modules["__main__"].__spec__ = None
    sys.modules["__main__"].__dict__.pop("__file__", None)
    sys.path[:] = [
        str(root),
        *(entry for entry in sys.path if Path(entry or ".").resolve() not in (root, ROOT)),
    ]
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(root))
    sys.exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider"])))


def tried(fault: Fault, copy: Path, seconds: float) -> Verdict:
    """Plant a fault in a copy of the project, and return what its tests say within so many seconds."""
    text = (copy / fault.file).read_text(encoding="utf-8")
    (copy / fault.file).write_text(fault.planted(text), encoding="utf-8")
    process = FORK.Process(
        target=run_tests, args=(copy, fault.tests.split(), copy.with_suffix(".log"))
    )
    process.start()
    try:
        process.join(seconds)
        word = CAUGHT if process.is_alive() else VERDICTS.get(process.exitcode, CAUGHT)
    finally:
        # The tests may have started processes.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        (copy / fault.file).write_text(text, encoding="utf-8")
    return Verdict(word, f"pytest ended with status {process.exitcode}" if word == UNUSABLE else "")


class Results:
    """Verdicts in a file, a line each, so that an interrupted run goes on.

    A verdict holds as long as the entry, the file with the fault and the files of its tests stay the same.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.known = {key: Verdict(*found) for key, found in map(json.loads, lines)}

    def key(self, fault: Fault) -> str:
        """Name everything that the verdict depends on."""
        digest = hashlib.sha256(json.dumps(fault).encode())
        for name in [fault.file, *(test.partition("::")[0] for test in fault.tests.split())]:
            path = self.root / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes() if file.is_file() else b"missing")
        return digest.hexdigest()

    def add(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        self.known[key] = verdict
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, verdict]) + "\n")


def misfit(fault: Fault, root: Path) -> str:
    """Say why a fault cannot be planted, or nothing."""
    try:
        fault.planted((root / fault.file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        return str(error)
    return ""


def judge(faults: list[Fault], root: Path, results: Results, seconds: float = 300) -> list[Verdict]:
    """Plant all faults that have no verdict yet. Returns the verdicts in the order of the faults."""
    from tqdm import tqdm

    with tempfile.TemporaryDirectory() as folder:
        verdicts, copy = [], Path(folder).resolve() / "copy"
        # An edit during the run does not reach the copy, so the keys are those of the beginning.
        keys = [results.key(fault) for fault in faults]
        copy_project(root, copy)
        for fault, key in zip(tqdm(faults, desc="Faults", disable=None), keys, strict=True):
            if why := misfit(fault, root):
                verdicts.append(Verdict(UNUSABLE, why))
                continue
            if key not in results.known:
                results.add(key, tried(fault, copy, seconds))
            verdicts.append(results.known[key])
    return verdicts


def report(
    faults: list[Fault], verdicts: list[Verdict], broken: set[str]
) -> tuple[list[str], bool]:
    """Write the lines of the summary, and tell whether every fault was caught or is harmless."""
    lines, counts = [], dict.fromkeys((CAUGHT, SURVIVED, UNUSABLE, "harmless"), 0)
    for fault, (word, why) in zip(faults, verdicts, strict=True):
        if broken & {*fault.tests.split()}:
            word, why = UNUSABLE, "its tests fail without it"
        if fault.harmless and word == CAUGHT:
            lines.append(f"called harmless, but caught: {fault}")
        elif fault.harmless and word == SURVIVED:
            word, why = "harmless", fault.harmless
        counts[word] += 1
        if word != CAUGHT:
            lines.append(f"{word}: {fault}{why and f' ({why})'}")
    counted = counts[CAUGHT] + counts[SURVIVED]
    share = f"{100 * counts[CAUGHT] / max(counted, 1):.1f} %"
    lines.append(
        f"caught {counts[CAUGHT]} of {counted} faults ({share}); {counts['harmless']} harmless"
    )
    return lines, not counts[SURVIVED] and not counts[UNUSABLE]


def main(args: list[str] | None = None) -> int:
    """Run one command line. The exit status is 1 if a fault survives that is not harmless, or cannot be planted."""
    parser = argparse.ArgumentParser("python -m tests.mutate", description=__doc__.splitlines()[0])
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILTER",
        default=[""],
        help="plant only faults with such a word",
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="SECONDS", help="longest run (default: 300)"
    )
    kept = Path(tempfile.gettempdir(), f"lit_knn-faults-{os.getuid()}.jsonl")
    parser.add_argument(
        "--results",
        type=Path,
        default=kept,
        metavar="FILE",
        help=f"kept verdicts (default: {kept})",
    )
    options = parser.parse_args(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Running tests are then ended, too.
    faults = read_faults(LISTS, options.words)
    for name in PRELOADED:
        importlib.import_module(name)
    # Runs without a fault, one for each file of tests: if a test fails anyway, it catches nothing.
    files = sorted({test for fault in faults for test in fault.tests.split()})
    clean = [Fault(test.partition("::")[0], "no fault", "", "", test) for test in files]
    verdicts = judge(clean + faults, ROOT, Results(options.results, ROOT), options.limit)
    broken = {
        test for test, verdict in zip(files, verdicts, strict=False) if verdict.word != SURVIVED
    }
    lines, good = report(faults, verdicts[len(clean) :], broken)
    print(*lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
