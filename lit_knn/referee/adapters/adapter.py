"""The base class of the adapters: an estimator whose posterior mean is computed by the code of a checkout.

The checkout's modules are imported from a folder that the user names, and leave no trace in this process.
"""

import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

from torch import Generator, Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet


class Origin(NamedTuple):
    """The version of another project that an adapter was written for."""

    repository: str  # address to clone
    commit: str


def checked(path: str, origin: Origin) -> Path:
    """Return the folder of a checkout; refuse a missing one, another commit and changed files."""
    folder, found = Path(path).expanduser().resolve(), "no folder"
    if folder.is_dir():
        git = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run([*git, "--exclude", "*"], capture_output=True, text=True)
        found = done.stdout.strip() or f"no checkout ({' '.join(done.stderr.split())})"
    if found != origin.commit:
        expected = f"expected a checkout of {origin.repository} at commit {origin.commit[:12]}"
        raise InputError(f"checkout={path} is {found}; {expected}")
    return folder


@contextmanager
def importing(root: Path, stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Import modules below the folder `root` inside the block, also those that its own functions import.

    `stand_ins` replace installed packages, by name. Afterwards `sys.path` and `sys.modules` are as before, so several
    checkouts with modules of the same name can be used.
    """
    scoped = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"}
    scoped |= {name.partition(".")[0] for name in stand_ins}
    before, path = _take_out(scoped), sys.path[:]
    sys.path.insert(0, str(root))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        _take_out(scoped)
        sys.modules.update(before)
        sys.path[:] = path


def stand_in(name: str, **members: Any) -> ModuleType:
    """Make a module that replaces an installed one."""
    module = ModuleType(name)
    # Libraries ask for the spec to learn whether a package is installed.
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    return module


def _take_out(names: set[str]) -> dict[str, ModuleType]:
    """Remove the modules below some top-level names from `sys.modules`, and return them."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in found:
        del sys.modules[name]
    return found


class Adapter(Estimator):
    """An estimator that runs other people's code. Its objects live with the reference set, so copies share them.

    The code draws from PyTorch's default generators, which `posterior_mean` seeds from its own.

    Args:
        checkout: folder of a checkout of the project, at the commit of `origin`.
    """

    origin: ClassVar[Origin]  # the version of the project that the adapter was written for
    referee_note: ClassVar[str]  # one sentence: what the code really computes
    stand_ins: ClassVar[Mapping[str, ModuleType]] = {}  # replace imported packages that do not enter the estimate

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout
        self._root = checked(checkout, self.origin)

    def bind(self, reference: ReferenceSet) -> Self:
        """Import the checkout and hand the images to its code."""
        super().bind(reference)
        _ = self.theirs
        return self

    @property
    def theirs(self) -> Any:
        """The object of the checkout's code that holds the images."""
        settings = repr(sorted(self.settings().items()))
        return self.reference.cached((type(self), settings), self._build)

    def _build(self) -> Any:
        with importing(self._root, self.stand_ins):
            return self._make()

    @abstractmethod
    def _make(self) -> Any:
        """Make the object of the checkout's code from `self.reference`. `import_module` finds its modules here."""

    def _mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        """Compute the mean of z (B, *shape), float32, by the checkout's code; x is its source if `uses_source`."""
        return self.theirs(z, t.float())

    def _posterior_mean(self, z: Tensor, t: Tensor, x_source: Tensor | None, generator: Generator | None) -> Tensor:
        return self._mean(z.float(), t.flatten(), None if x_source is None else x_source.float())
