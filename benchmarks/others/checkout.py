"""Estimators whose posterior mean is computed by other people's code, from a folder of the user.

None of their code is part of this project.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet


class OthersEstimator(Estimator):
    """Calls an object of another project. A subclass names the class of the object and makes it.

    Their code draws from PyTorch's default generators, which `posterior_mean` seeds.

    Args:
        folder: a checkout of the project.
    """

    project: ClassVar[str]  # owner and name on GitHub
    module: ClassVar[str]  # the module of their class
    name: ClassVar[str]  # their class

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()

    def bind(self, reference: ReferenceSet) -> Self:
        """Import their code and hand the images to it."""
        super().bind(reference)

        with modules_of(self.folder):
            self.theirs = self.make(self._import())

        return self

    @abstractmethod
    def make(self, their_class: Any) -> Any:
        """Make the object of their class that estimates. It may import more of their modules."""

    @abstractmethod
    def mean(self, z: Tensor, t: Tensor, x: Tensor | None) -> Tensor:
        """Call their object for z (B, *shape) at t (B,), float32; x are the sources, if used."""

    def _posterior_mean(self, z: Tensor, t: Tensor, x_source: Tensor | None, _: object) -> Tensor:
        return self.mean(z, t.flatten().float(), x_source)

    def _import(self) -> Any:
        file = f"{self.module.replace('.', '/')}.py"

        if not (self.folder / file).is_file():
            raise InputError(f"{self.folder} has no {file}; clone github.com/{self.project}")

        try:
            module = import_module(self.module)
        except ModuleNotFoundError as error:
            raise InputError(f"{self.folder}/{file} needs the package {error.name}") from error

        if not hasattr(module, self.name):
            raise InputError(f"{self.folder}/{file} has no {self.name}")

        return getattr(module, self.name)


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Import modules below `folder` inside the block, and forget them after it.

    Several projects have modules of the same name. Objects that were made in the block keep
    working.
    """
    before = set(sys.modules)
    sys.path.insert(0, str(folder))

    try:
        yield
    finally:
        sys.path.remove(str(folder))

        for name in set(sys.modules) - before:
            top = name.partition(".")[0]

            if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
                del sys.modules[name]
