"""The application from a checkout: `python main.py fit -c configs/demo.yaml` is `lit-knn fit -c demo`."""

import lit_knn.startup  # isort: skip  # noqa: F401  # First, because of Ctrl-C during the other imports.

from typing import Any

from lit_knn.command_line.entry import main


def __getattr__(name: str) -> Any:
    # Scripts take `make_cli` from here. Its module takes seconds to import, which `main.py prepare` does not need.
    from lit_knn.command_line import cli

    return getattr(cli, name)


if __name__ == "__main__":
    main()
