import gc
import logging
import os
import signal
import sys
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

# Tensors in tests are tiny: a second thread costs more waiting time than it saves. Libraries read this when they are
# loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples each time; nothing is kept in files, and slow machines change nothing.
repeatable = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("repeatable", max_examples=40, **repeatable)
settings.load_profile("repeatable")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# A shell starts what runs in the background without Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _quiet_and_deterministic():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        yield


@pytest.fixture(autouse=True)
def _leaves_lightning_as_loud_as_it_was():
    # A level that one test leaves would hide from a later one what Lightning says, if one process runs both.
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    yield
    left = logger.level
    logger.setLevel(level)
    assert left == level, "the test left another level of Lightning's messages"


@pytest.fixture(autouse=True)
def _leaves_no_checkpoints():
    # Lightning's default: a fit without a callback for checkpoints writes them into the current folder.
    folder = Path.cwd() / "checkpoints"
    there = folder.exists()
    yield
    assert there or not folder.exists(), (
        f"the test left {folder}: give enable_checkpointing=False or a folder"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run tests marked `gpu` on the GPU of this machine, or on a stand-in where there is none."""
    with ExitStack() as stack:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            from tests.pretend_cuda import PretendCuda

            stack.enter_context(PretendCuda())
        return (yield)


@pytest.fixture
def stand_in():
    """The stand-in GPU, which counts how often the host waits; see `record()` in `tests.pretend_cuda`."""
    if torch.cuda.is_available():
        pytest.skip("waits are counted only on the stand-in, and this machine has a GPU")
    from tests.pretend_cuda import PretendCuda

    with PretendCuda() as gpu:
        yield gpu


@pytest.fixture
def real_gpu():
    """Skip the test where the stand-in cannot replace a GPU: FAISS has kernels of its own."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Work in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def blank_figures(monkeypatch):
    """Draw nothing into figures: for runs whose tables are looked at, and whose figures other tests look at."""
    monkeypatch.setattr("matplotlib.figure.Figure.draw", lambda self, renderer: None)


@pytest.fixture
def every_u(monkeypatch):
    """`with every_u(grid):` spreads the uniform random numbers of `grid` rows, one per row, evenly over (0, 1).

    An average over the rows is then an integral over that number, without sampling noise.
    """

    @contextmanager
    def block(grid):
        u = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_, **__: u.unsqueeze(1))
            yield

    return block


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """`trained_run("edm")`: a run's folder and options, see `tests.trained_runs`. Copy it before changing it."""
    from tests.trained_runs import shared_run

    # Each worker of pytest-xdist has a folder of its own below that of the whole test run.
    folder = tmp_path_factory.getbasetemp()
    return partial(shared_run, folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="session")
def random_weights(tmp_path_factory):
    """A file of random Inception weights."""
    from tests.inception import write_random_weights

    path = tmp_path_factory.mktemp("weights") / "random.pth"
    write_random_weights(path)
    return str(path)


def pytest_collection_finish(session):
    # What all tests share stays to the end. Looking through it for garbage takes time, and copies it in forks.
    gc.freeze()
    gc.set_threshold(10_000)
    # Some tests change the import path, and the server keeps the path that it started with.
    if "tests.ranks" in sys.modules:
        forkserver.ensure_running()


def pytest_sessionfinish(session):
    gc.unfreeze()  # Some libraries complain about objects that are there at the exit.
