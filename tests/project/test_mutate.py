"""The tool that plants faults, on a project of one function; and that every listed fault fits its file."""

import subprocess
from collections import Counter

import pytest

from tests.mutate import (
    CAUGHT,
    LISTS,
    ROOT,
    SURVIVED,
    UNUSABLE,
    Fault,
    Results,
    Verdict,
    judge,
    misfit,
    read_faults,
)

TESTS = "tests/test_toy.py"
FAULTS = [
    Fault("toy.py", "wrong sign", "a + b", "a - b", TESTS),
    Fault("toy.py", "wrong comment", "A sum.", "A product.", TESTS, "no test reads comments"),
    Fault("toy.py", "other zero", "total = 0", "total = 0.0", TESTS),
    Fault("toy.py", "gone", "a * b", "a / b", TESTS),
    Fault("toy.py", "broken", "a + b", "a + (", TESTS),
    Fault("toy.py", "no such test", "a + b", "a - b", "tests/test_gone.py"),
]
WORDS = [CAUGHT, SURVIVED, SURVIVED, UNUSABLE, UNUSABLE, UNUSABLE]


@pytest.mark.slow  # It starts eight processes of pytest.
def test_planted_faults_are_judged_and_undone(tmp_path):
    toy = tmp_path / "toy"
    (toy / "tests").mkdir(parents=True)
    (toy / "toy.py").write_text(
        'total = 0\n\n\ndef add(a, b):\n    """A sum."""\n    return a + b\n'
    )
    (toy / TESTS).write_text(
        "from toy import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=toy, check=True)
    before = (toy / "toy.py").read_text()
    verdicts = judge(FAULTS, toy, Results(tmp_path / "kept.jsonl", toy))
    assert [verdict.word for verdict in verdicts] == WORDS
    assert (toy / "toy.py").read_text() == before
    # The second run reads the verdicts of the first; an edit of the tests makes them void.
    kept = Results(tmp_path / "kept.jsonl", toy)
    assert kept.known[kept.key(FAULTS[0])] == Verdict(CAUGHT)
    (toy / TESTS).write_text("def test_nothing():\n    pass\n")
    assert judge(FAULTS[:1], toy, Results(tmp_path / "kept.jsonl", toy)) == [Verdict(SURVIVED)]


def test_faults_are_found_by_function_and_tokens():
    method = "class A:\n    def f(x):\n        return g(\n            x,\n            1,\n        )\n\n\n"
    function = "def f(x):\n    return g(x, 1)\n"
    fault = Fault("toy.py", "another number", "g(x, 1)", "g(x, 2)", TESTS)
    planted = "class A:\n    def f(x):\n        return g(x, 2)\n\n\n"

    assert fault.planted(method) == planted
    assert fault._replace(function="A.f").planted(method + function) == planted + function
    assert fault._replace(function="f").planted(method + function) == method + function.replace(
        "1", "2"
    )
    with pytest.raises(ValueError, match="0 functions have the name h"):
        fault._replace(function="h").planted(method + function)
    with pytest.raises(ValueError, match="2 times"):
        fault.planted(function + function)


def test_every_listed_fault_fits_its_file():
    faults = read_faults(LISTS)
    assert not {str(fault): why for fault in faults if (why := misfit(fault, ROOT))}
    assert not [fault for fault in faults if fault.old == fault.new]
    assert not [name for name, times in Counter(map(str, faults)).items() if times > 1]
    files = {test.partition("::")[0] for fault in faults for test in fault.tests.split()}
    assert not [name for name in files if not (ROOT / name).exists()]
    assert all(fault.tests for fault in faults)
