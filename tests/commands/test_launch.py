"""Variables that a launcher has left in the environment, and the processes that the trainer asks for."""

import pytest
import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_only

from lit_knn.commands.cli.launch import check_processes
from main import main
from tests.command_lines import DEMO, TINY, refusal_of

pytestmark = pytest.mark.usefixtures("own_folder")

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "2"}
ONE = "trainer.num_nodes=1 and trainer.devices=1 ask for processes: 1; unset these variables, or give --trainer."
TWO = "trainer.num_nodes=1 and trainer.devices=2 ask for processes: 2; unset these variables, or give --trainer."


def set_variables(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_variables_of_two_processes_refuse_one_device(command, rank, tmp_path, monkeypatch, capsys):
    set_variables({"RANK": str(rank), "WORLD_SIZE": "2"}, monkeypatch)
    monkeypatch.setattr(rank_zero_only, "rank", rank)  # Lightning sets it when it is imported.
    measured = ["-c", "figure1/toy", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    options = ["-c", DEMO, *TINY] if command == "fit" else measured
    with pytest.raises(SystemExit) as stop:
        main([command, *options])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rror" in line]
    assert stop.value.code == 2
    assert f"the environment has RANK={rank} and WORLD_SIZE=2, but {ONE}" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", ""), ("LOCAL_RANK", ""), ("SLURM_NTASKS", "2x"), ("SLURM_NODEID", "node7")],
)
def test_a_variable_that_is_no_number_is_named(name, value, monkeypatch, capsys):
    set_variables({name: value}, monkeypatch)
    line = refusal_of(["fit", "-c", DEMO, *TINY], capsys)
    assert line == f"error: the environment has {name}={value}, which is no number: unset it"


@pytest.mark.parametrize(
    "more", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_PROCID": "0"}]
)
def test_a_left_number_of_tasks_is_named(more, tmp_path, monkeypatch, capsys):
    set_variables({"SLURM_NTASKS": "2", **more}, monkeypatch)
    line = refusal_of(["fit", "-c", DEMO, *TINY], capsys)
    assert (
        "the environment has SLURM_NTASKS=2, which does not fit these options: unset it, or give "
        in line
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "devices", "message"),
    [
        ({"WORLD_SIZE": "2"}, 1, f"the environment has WORLD_SIZE=2, but {ONE}"),
        ({"NODE_RANK": "1"}, 1, f"the environment has NODE_RANK=1, but {ONE}"),
        ({"GROUP_RANK": "1"}, 2, f"the environment has GROUP_RANK=1, but {TWO}"),
        # Lightning would start no process, and wait for one.
        ({"LOCAL_RANK": "0"}, 2, f"the environment has LOCAL_RANK=0, but {TWO}"),
        (
            {"WORLD_SIZE": "4", "RANK": "3"},
            2,
            f"the environment has RANK=3 and WORLD_SIZE=4, but {TWO}",
        ),
        (
            {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"},
            1,
            "JSM_NAMESPACE_RANK=1 and JSM_NAMESPACE_SIZE=2, but",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            1,
            f"the environment has OMPI_COMM_WORLD_SIZE=2, but {ONE}",
        ),
        (
            {**SHELL, "SLURM_PROCID": "1"},
            1,
            f"the environment has SLURM_PROCID=1 and SLURM_NTASKS=2, but {ONE}",
        ),
    ],
)
def test_variables_that_do_not_fit_are_named(variables, devices, message, monkeypatch):
    set_variables(variables, monkeypatch)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        check_processes(trainer(devices))


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, 1),
        # One process on a machine of two devices: Lightning starts the other.
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, 2),
        ({"MASTER_ADDR": "127.0.0.1"}, 1),
        ({**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
        # The process that Lightning itself starts on this machine
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, 2),
        ({**SHELL, "SLURM_PROCID": "0"}, 1),
        ({**SHELL, "SLURM_JOB_NAME": "interactive"}, 1),
    ],
)
def test_variables_that_fit_are_no_obstacle(variables, devices, monkeypatch):
    set_variables(variables, monkeypatch)
    check_processes(trainer(devices))


OTHER_MACHINE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    "variables",
    [
        {**TORCHRUN, "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        OTHER_MACHINE,
        # A launcher with one process on each machine, which starts the other one
        {**OTHER_MACHINE, "RANK": "1", "WORLD_SIZE": "2"},
    ],
)
def test_two_machines_of_two_devices_are_no_obstacle(variables, monkeypatch):
    set_variables(variables, monkeypatch)
    check_processes(trainer(2, num_nodes=2))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # Four machines with a process each
        (
            {**TORCHRUN, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"},
            "torchrun has started 4 processes, but ",
        ),
        (
            {**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun has started 2 processes, but ",
        ),
        ({**OTHER_MACHINE, "NODE_RANK": "2"}, "the environment has NODE_RANK=2, but "),
        (
            {"MASTER_ADDR": "10.0.0.1"},
            r"num_nodes=2 needs a launcher, .* or MASTER_ADDR and NODE_RANK",
        ),
    ],
)
def test_processes_on_other_machines_must_fit(variables, message, monkeypatch):
    set_variables(variables, monkeypatch)
    with pytest.raises(ValueError, match=message):
        check_processes(trainer(2, num_nodes=2))


def trainer(devices, num_nodes=1):
    strategy = "ddp" if devices > 1 else "auto"
    options = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    options |= {"num_nodes": num_nodes, "strategy": strategy, "logger": False}
    return pl.Trainer(accelerator="cpu", devices=devices, **options)
