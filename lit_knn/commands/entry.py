"""The command `lit-knn`: finds the module of a subcommand, and imports no other one."""

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import lit_knn
from lit_knn.commands.cli.packaged_configs import with_packaged_configs
from lit_knn.common.errors import InputError, errors_in_one_line
from lit_knn.common.files import at_home

DEBUG = "--debug"
# These modules have parsers of their own, and need no trainer. `prepare` imports no torch.
ALONE = ("average", "export", "report", "prepare", "convert")
# If they are interrupted, these commands go on with what is missing.
GO_ON = ("average", "export", "report", "prepare")
# `cli` parses the other commands.
COMMANDS = {
    "fit": "train a model",
    "validate": "measure a checkpoint, or estimators without any training",
    "predict": "draw samples",
    "plan": "tell what a run needs, and whether it fits, before it starts",
    "probe": "tell what better targets would bring on your data, before any training",
    "best": "measure all kept checkpoints of a run, and name the best",
    "report": "put training runs side by side",
    "average": "make averages of a run's weights, after the run",
    "export": "write a trained model for others",
    "prepare": "make one file of many images",
    "convert": "convert a published EDM network to safetensors",
}
# Lightning reads these variables of launchers as numbers when it is imported.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
# Other programs call these commands so.
OTHER_NAMES = {"train": "fit", "test": "validate", "sample": "predict", "generate": "predict"}
EPILOG = """Configs: `-c demo` is configs/demo.yaml of lit_knn, `-c my.yaml` a file of yours.
More about a command: lit-knn COMMAND --help. --debug: also show the traceback of an error."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line; an error ends it with one line, and status 2 for bad input or 1 for a fault of ours."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # A terminal without an é must not end a run.
        sys.stdout.reconfigure(errors="backslashreplace")

    typed = list(sys.argv[1:] if args is None else args)
    words = [arg for arg in typed if arg != DEBUG]
    name = words[0] if words else ""
    if name in ("-h", "--help", "--version"):
        _parser().parse_args(words[:1])
    if name in ("", "help"):
        _parser().print_help()
        return

    with errors_in_one_line(name, DEBUG in typed):
        try:
            _run([_at_home(arg) for arg in words])
        except KeyboardInterrupt:
            advice = "; the same command goes on" if name in GO_ON else ""
            print(f"interrupted{advice}", file=sys.stderr)
            raise SystemExit(130) from None


def _run(words: list[str]) -> None:
    """Import the module of a command, and run it."""
    name = words[0]
    if name in ALONE:
        module = importlib.import_module(f"lit_knn.commands.{name}")
        module.main(with_packaged_configs(words[1:]))
        return
    if name not in COMMANDS:
        raise InputError(_no_command(words))

    _check_ranks()
    from lit_knn.commands.cli import command

    command.main(words)


def _check_ranks() -> None:
    """Refuse a rank that is no number, such as an empty one."""
    for name in RANKS:
        rank = os.environ.get(name)
        if rank is not None and not rank.isdecimal():
            raise InputError(f"the environment has {name}={rank}, which is no number: unset it")


def _no_command(args: Sequence[str]) -> str:
    """Say what is wrong with a command line that does not begin with a command."""
    name = args[0]
    all_commands = f"the commands are {', '.join(COMMANDS)}"
    if name.startswith("-"):
        command = next((arg for arg in args if arg in COMMANDS), "COMMAND")
        return f"the command comes first: lit-knn {command} {name} …; {all_commands}"

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    if name in OTHER_NAMES:
        near = [OTHER_NAMES[name]]
    hint = f"did you mean {near[0]}?" if near else all_commands
    return f"there is no command {name!r}; {hint}"


def _at_home(arg: str) -> str:
    """Replace `~` where a path begins: a shell leaves it in quotes and in --OPTION=~/FILE."""
    option, equals, value = "", "", arg
    if arg.startswith("-"):
        option, equals, value = arg.partition("=")
    if value == "~":  # It is YAML's null.
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
