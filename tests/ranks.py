"""Starts the processes of a distributed run quickly: a server imports everything once, and they are its forks."""

import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

SECONDS = 120
SERVER = multiprocessing.get_context("forkserver")
PROBES = ["tests.index_probe", "tests.sharded_probe", "tests.ddp_probe"]
SERVER.set_forkserver_preload(["lit_knn.commands.cli.command", "tests.ranks", *PROBES])


class Done(NamedTuple):
    """Exit status, stdout and stderr of each rank."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]

    @property
    def stdout(self):
        return "".join(self.outputs)

    @property
    def stderr(self):
        return "".join(self.errors)


def run_ranks(module, folder, how, ranks):
    """Run `module.main(rank, ranks, folder, how)` for all ranks at once."""
    return _run([(_probe, (module, rank, ranks, folder, how)) for rank in range(ranks)], ROOT, {})


def run_main(args, ranks=1, check=True, last=(), nodes=1):
    """Run `python main.py ARGS` in the current folder, with one process per device, as torchrun does.

    The last rank alone gets the options `last`, too. The ranks are divided among `nodes` machines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    devices = ranks // nodes
    args = [*map(str, args), "--trainer.devices", str(devices), "--trainer.strategy", "ddp"]
    args += ["--trainer.num_nodes", str(nodes)]
    each = [[*args, *last] if rank == ranks - 1 else args for rank in range(ranks)]
    done = _run([(_main, (each[rank], rank, devices)) for rank in range(ranks)], Path.cwd(), world)
    assert not check or not any(done.codes), done.stderr[-3000:]
    return done


def run_torchrun(args, ranks):
    """Run `torchrun --nproc_per_node RANKS main.py ARGS` in the current folder: torchrun's agent starts the forks."""
    done = _run([(_torchrun, ([*map(str, args)], ranks))], Path.cwd(), {})
    assert done.codes == [0], done.stderr[-3000:]
    return done


def _run(works, folder, environment):
    with tempfile.TemporaryDirectory() as logs:
        files = [
            [Path(logs, f"{rank}.{kind}") for kind in ("out", "err")] for rank in range(len(works))
        ]
        processes = [
            SERVER.Process(target=_begin, args=(work, args, folder, environment, *paths))
            for (work, args), paths in zip(works, files, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
        outputs, errors = ([path.read_text() for path in kind] for kind in zip(*files, strict=True))
    return Done([process.exitcode for process in processes], outputs, errors)


def _begin(work, args, folder, environment, out, err):
    import torch

    os.chdir(folder)
    os.environ.update(environment)
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    torch.set_num_threads(1)
    try:
        work(*args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _probe(module, *args):
    __import__(module)
    sys.modules[module].main(*args)


def _main(args, rank, devices):
    from lightning_utilities.core.rank_zero import rank_zero_only

    from lit_knn.commands.entry import main

    os.environ |= {"NODE_RANK": str(rank // devices), "LOCAL_RANK": str(rank % devices)}
    rank_zero_only.rank = rank
    sys.argv = ["main.py", *args]
    main(args)


def _torchrun(args, ranks):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    elastic_launch(
        LaunchConfig(1, 1, ranks, start_method="fork", max_restarts=0, **where), _of_torchrun
    )(args)


def _of_torchrun(args):
    _main(args, int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
