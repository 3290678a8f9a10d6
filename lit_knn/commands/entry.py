"""The program `lit-knn`: finds the module of a command and runs it, without importing the modules of the others."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import lit_knn
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.common.errors import InputError, nearest
from lit_knn.common.files import at_home
from lit_knn.common.one_line import errors_in_one_line

DEBUG = "--debug"
STATUS_OF_CTRL_C = 130  # the shell's exit status: 128 and the number of the signal
# Each of these commands is a module with its own parser, and needs no trainer. `prepare` needs not even torch.
COMMANDS_WITH_OWN_PARSER = ("average", "export", "report", "prepare", "convert", "score")
# If one of these commands was interrupted, the same command continues with what is missing.
COMMANDS_THAT_CONTINUE = ("average", "export", "report", "prepare")
# All commands, with what they do. Those without their own parser are parsed by `lit_knn.commands.cli`.
COMMANDS = {
    "fit": "train a model",
    "validate": "measure a checkpoint, or estimators without any training",
    "predict": "draw samples",
    "plan": "tell what a run needs, and whether it fits, before it starts",
    "probe": "tell what better targets would bring on your data, before any training",
    "best": "measure all kept checkpoints of a run, and name the best",
    "report": "put training runs side by side",
    "score": "compare samples of any program with any data",
    "average": "make averages of a run's weights, after the run",
    "export": "write a trained model for others",
    "prepare": "make one file of many images",
    "convert": "convert a published EDM network to safetensors",
}
# Lightning reads these variables of launchers, and fails without their names if one is no number.
NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "JSM_NAMESPACE_RANK",
)
# Names that other programs have for these commands.
OTHER_NAMES = {"train": "fit", "test": "validate", "sample": "predict", "generate": "predict"}
EPILOG = """Configs: `-c demo` is configs/demo.yaml of lit_knn, `-c my.yaml` a file of yours.
More about a command: lit-knn COMMAND --help. --debug: also show the traceback of an error."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; an error is printed in one line, and the exit status is 2 for bad input or 1 for a bug."""
    # Letters that a terminal cannot show are printed as escapes, and do not end a run with an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    typed = list(sys.argv[1:] if args is None else args)
    words = [arg for arg in typed if arg != DEBUG]
    name = words[0] if words else ""
    if name in ("-h", "--help", "--version"):
        _parser().parse_args(
            words[:1]
        )  # Called to print the help or the version; it ends the process.
    if name in ("", "help"):
        _parser().print_help()
        return

    with errors_in_one_line(name, DEBUG in typed):
        try:
            _run([_at_home(arg) for arg in words])
        except KeyboardInterrupt:
            advice = "; the same command goes on" if name in COMMANDS_THAT_CONTINUE else ""
            print(f"interrupted{advice}", file=sys.stderr)
            raise SystemExit(STATUS_OF_CTRL_C) from None


def _run(words: list[str]) -> None:
    """Import the module of a command, and run it.

    Args:
        words: the command and its arguments.
    """
    name = words[0]
    if name in COMMANDS_WITH_OWN_PARSER:
        module = importlib.import_module(f"lit_knn.commands.{name}")
        module.main(with_packaged_configs(words[1:]))
        return
    if name not in COMMANDS:
        raise InputError(_no_command(words))

    _check_numbers()
    from lit_knn.commands.cli import command

    command.main(words)


def _check_numbers() -> None:
    """Raise InputError if a launcher's variable for a number is none, such as an empty text."""
    for name in NUMBERS:
        value = os.environ.get(name)
        if value is not None and not value.isdecimal():
            raise InputError(f"the environment has {name}={value}, which is no number: unset it")


def _no_command(args: Sequence[str]) -> str:
    """Return a message on a command line that does not begin with a command."""
    name = args[0]
    all_commands = f"the commands are {', '.join(COMMANDS)}"
    if name.startswith("-"):
        command = next((arg for arg in args if arg in COMMANDS), "COMMAND")
        return f"the command comes first: lit-knn {command} {name} …; {all_commands}"

    hint = nearest(OTHER_NAMES.get(name, name), COMMANDS) or f"; {all_commands}"
    return f"there is no command {name!r}{hint}"


def _at_home(arg: str) -> str:
    """Return an argument with the home folder in place of `~` at the beginning of a path.

    A shell does not replace it in quotes and in --OPTION=~/FILE.
    """
    option, equals, value = "", "", arg
    if arg.startswith("-"):
        option, equals, value = arg.partition("=")
    # A `~` alone is no path, but YAML's null.
    if value == "~":
        return arg
    return f"{option}{equals}{at_home(value)}"


def _parser() -> argparse.ArgumentParser:
    """Return a parser that only shows the help and the version."""
    lines = "\n".join(f"  {name:9}  {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lit-knn",
        usage="lit-knn COMMAND [-c CONFIG] [--OPTION VALUE ...]",
        description=f"Train and evaluate diffusion models whose score estimator is a plug-in.\n\ncommands:\n{lines}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lit_knn {lit_knn.__version__}")
    return parser
