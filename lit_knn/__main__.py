"""`python -m lit_knn` is the command `lit-knn`."""

import lit_knn.common.startup  # isort: skip  # noqa: F401  # First, because of Ctrl-C during the other imports.

from lit_knn.commands.entry import main

if __name__ == "__main__":
    main()
