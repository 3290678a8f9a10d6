"""Makes one object from its class path and options, apart from the objects of a run."""

from typing import TypeVar

from jsonargparse import ArgumentParser

from lit_knn.commands.cli.messages import refusal

Made = TypeVar("Made")


def make_object(base: type[Made], name: str, spec: object) -> Made:
    """Return the object of a class path and its options.

    Args:
        base: the class that it must be of.
        name: name of its option, for messages.
        spec: `class_path` and `init_args`.

    Raises:
        InputError: there is no such class, or its constructor fails.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, name, required=True)
    try:
        made: Made = parser.instantiate(parser.parse_object({name: spec}))[name]
    except Exception as error:  # The class may be a user's.
        raise refusal(error) from error
    return made
