"""Checks that the processes that a launcher started are those that the trainer asks for."""

import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from lit_knn.common.errors import InputError

# Launchers tell each process its number and the number of processes in these variables. A shell
# that was started in a job has them, too.
MACHINES = ("NODE_RANK", "GROUP_RANK")
RANKS = (
    "RANK",
    "LOCAL_RANK",
    *MACHINES,
    "JSM_NAMESPACE_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
)
SIZES = ("WORLD_SIZE", "JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def check_processes(trainer: pl.Trainer) -> None:
    """Refuse processes that would each train a model of its own, or wait forever for others."""
    if torch.distributed.is_torchelastic_launched():
        _check_torchrun(trainer)
    elif SLURMEnvironment.detect():
        _check_srun(trainer)
    else:
        _check_machines(trainer)
        _check_left_variables(trainer)


def _check_torchrun(trainer: pl.Trainer) -> None:
    """Refuse other numbers of processes than torchrun has started, in all and on this machine."""
    started = int(os.environ["WORLD_SIZE"])
    on_this_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    _check_number("torchrun", started, trainer, trainer.num_devices == on_this_machine)


def _check_srun(trainer: pl.Trainer) -> None:
    """Refuse another number of processes than srun has started, and a batch script without srun."""
    started = int(os.environ["SLURM_NTASKS"])
    if started > 1 and not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys():
        advice = "write `srun lit-knn …` into the batch script"
        raise InputError(f"SLURM_NTASKS={started}, but srun has not started this process: {advice}")
    _check_number("srun", started, trainer)


def _check_number(launcher: str, started: int, trainer: pl.Trainer, fits: bool = True) -> None:
    """Refuse a number of started processes that is not the trainer's."""
    asked = trainer.num_devices * trainer.num_nodes
    if started != asked or not fits:
        options = f"trainer.num_nodes={trainer.num_nodes} and trainer.devices={trainer.num_devices}"
        rule = f"but {options} ask for {asked}: give the machines and the processes of each"
        raise InputError(f"{launcher} has started {started} processes, {rule}")


def _check_machines(trainer: pl.Trainer) -> None:
    """Refuse several machines that have no numbers. Each must know its own."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    has_numbers = all(name in os.environ for name in ("MASTER_ADDR", "NODE_RANK"))
    is_launched = not isinstance(environment, LightningEnvironment | None)
    if trainer.num_nodes > 1 and not has_numbers and not is_launched:
        variables = "MASTER_ADDR and NODE_RANK in the environment of each machine"
        needed = f"a launcher, torchrun or srun, or {variables}"
        raise InputError(f"trainer.num_nodes={trainer.num_nodes} needs {needed}")


def _check_left_variables(trainer: pl.Trainer) -> None:
    """Refuse variables of a launcher that say something else than the trainer does.

    They are those of another job, or the options for several processes are missing. A launcher may
    also start one process on each machine, or one at all: Lightning then starts the others.
    """
    nodes, devices = trainer.num_nodes, trainer.num_devices
    right_sizes = {"1", str(nodes), str(nodes * devices)}
    right_machines = {str(number) for number in range(nodes)}

    # A shell of srun or salloc has the number of all tasks, and is the first of them.
    is_first_task = os.environ.get("SLURM_PROCID", "0") == "0"
    sizes = [name for name in SIZES if not (name == "SLURM_NTASKS" and is_first_task)]
    wrong = [name for name in sizes if os.environ.get(name, "1") not in right_sizes]
    wrong += [name for name in MACHINES if os.environ.get(name, "0") not in right_machines]

    # With LOCAL_RANK, Lightning starts no other process. They would not meet without a common port.
    if devices > 1 and "LOCAL_RANK" in os.environ and "MASTER_PORT" not in os.environ:
        wrong.append("LOCAL_RANK")
    if not wrong:
        return

    variables = [f"{name}={os.environ[name]}" for name in RANKS + SIZES if name in os.environ]
    options = f"trainer.num_nodes={nodes} and trainer.devices={devices}"
    asked = f"but {options} ask for processes: {nodes * devices}"
    advice = "unset these variables, or give --trainer.num_nodes and --trainer.devices"
    raise InputError(f"the environment has {' and '.join(variables)}, {asked}; {advice}")
