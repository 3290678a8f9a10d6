"""The application from a checkout: `python main.py fit -c configs/demo.yaml` is `lit-knn fit -c demo`."""

import lit_knn.common.startup  # isort: skip  # noqa: F401  # First, because of Ctrl-C during the other imports.

from typing import Any

from lit_knn.commands.entry import main


def __getattr__(name: str) -> Any:
    # Scripts take `make_cli` from here. Its module takes seconds to import, which `main.py prepare` does not need.
    from lit_knn.commands.cli import cli

    return getattr(cli, name)


if __name__ == "__main__":
    main()
