"""Checks that a launcher has started the processes that the trainer asks for."""

import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment

from lit_knn.common.errors import InputError

# In these variables, launchers tell each process its number (RANKS, and MACHINES of its machine) and the number of
# processes (SIZES). A shell that was started in a job has them, too.
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
    """Raise InputError if the processes would each train a separate model, or wait forever for missing ones."""
    if torch.distributed.is_torchelastic_launched():
        _check_torchrun(trainer)
    elif SLURMEnvironment.detect():
        _check_srun(trainer)
    else:
        _check_machines(trainer)
        _check_left_variables(trainer)


def _check_torchrun(trainer: pl.Trainer) -> None:
    """Raise InputError if torchrun has started other numbers of processes, in all and here, than are asked for."""
    started = int(os.environ["WORLD_SIZE"])
    on_this_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    _check_number("torchrun", started, trainer, trainer.num_devices == on_this_machine)


def _check_srun(trainer: pl.Trainer) -> None:
    """Raise InputError if srun has started another number of processes than asked, or has not started this one."""
    started = int(os.environ["SLURM_NTASKS"])
    if started > 1 and not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys():
        advice = "write `srun lit-knn …` into the batch script"
        raise InputError(f"SLURM_NTASKS={started}, but srun has not started this process: {advice}")
    _check_number("srun", started, trainer)


def _check_number(launcher: str, started: int, trainer: pl.Trainer, fits: bool = True) -> None:
    """Raise InputError if the number of started processes is not the trainer's, or if they do not fit otherwise.

    Args:
        launcher: name of the launcher.
        started: the number of processes that it has started on all machines.
        trainer: asks for processes.
        fits: the result of another check of the processes.
    """
    asked = trainer.num_devices * trainer.num_nodes
    if started != asked or not fits:
        options = f"trainer.num_nodes={trainer.num_nodes} and trainer.devices={trainer.num_devices}"
        rule = f"but {options} ask for {asked}: give the machines and the processes of each"
        raise InputError(f"{launcher} has started {started} processes, {rule}")


def _check_machines(trainer: pl.Trainer) -> None:
    """Raise InputError if there are several machines and nothing tells this one its number."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    has_numbers = all(name in os.environ for name in ("MASTER_ADDR", "NODE_RANK"))
    is_launched = not isinstance(environment, LightningEnvironment | None)
    if trainer.num_nodes > 1 and not has_numbers and not is_launched:
        variables = "MASTER_ADDR and NODE_RANK in the environment of each machine"
        needed = f"a launcher, torchrun or srun, or {variables}"
        raise InputError(f"trainer.num_nodes={trainer.num_nodes} needs {needed}")


def _check_left_variables(trainer: pl.Trainer) -> None:
    """Raise InputError if variables of a launcher contradict the trainer.

    They are left from another job, or the options for several processes are missing. Three numbers of
    processes are right: all of them, one on each machine, and one in all. Lightning starts the missing ones.
    """
    nodes, devices = trainer.num_nodes, trainer.num_devices
    right_sizes = {"1", str(nodes), str(nodes * devices)}
    right_machines = {str(number) for number in range(nodes)}

    # In a shell that srun or salloc has started, SLURM_NTASKS is the number of all tasks, but the shell runs alone.
    is_first_task = os.environ.get("SLURM_PROCID", "0") == "0"
    sizes = [name for name in SIZES if not (name == "SLURM_NTASKS" and is_first_task)]
    wrong = [name for name in sizes if os.environ.get(name, "1") not in right_sizes]
    wrong += [name for name in MACHINES if os.environ.get(name, "0") not in right_machines]

    # With LOCAL_RANK, Lightning starts no other process, and without a common port processes would not find each other.
    if devices > 1 and "LOCAL_RANK" in os.environ and "MASTER_PORT" not in os.environ:
        wrong.append("LOCAL_RANK")
    if not wrong:
        return

    variables = [f"{name}={os.environ[name]}" for name in RANKS + SIZES if name in os.environ]
    options = f"trainer.num_nodes={nodes} and trainer.devices={devices}"
    asked = f"but {options} ask for processes: {nodes * devices}"
    advice = "unset these variables, or give --trainer.num_nodes and --trainer.devices"
    raise InputError(f"the environment has {' and '.join(variables)}, {asked}; {advice}")
