"""Writes and reads the checkpoints of a training: whole files, checked before they are used."""

from pathlib import Path

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_knn.common.checkpoint_file import Content, read_checkpoint_file
from lit_knn.common.errors import InputError, causes, first_line
from lit_knn.common.files import remove_partial, written_whole
from lit_knn.runs.states import Owners, explained, unreadable, without

# `global_step` and the version are in every checkpoint of Lightning; only a `fit` needs the rest.
NEEDED = ("state_dict", "global_step", "pytorch-lightning_version")
NEEDED_BY_FIT = ("optimizer_states", "lr_schedulers", "loops")
# `lit-knn average` writes this into its checkpoints.
AVERAGE_KEY = "power_average"


class WholeCheckpointIO(TorchCheckpointIO):
    """Replaces a checkpoint only when the new one is complete on the disk.

    It reads only undamaged ones. Lightning's own class does not wait for the disk, and a file that
    is cut short fails only when it is read.
    """

    # A checkpoint that was read already, with its path.
    _read: tuple[str, Content] | None = None
    # The names of those who keep states in the checkpoints, see `owners_of`.
    owners: Owners | None = None

    def keep(self, path: str | Path, checkpoint: Content) -> None:
        """Keep a checkpoint that was read and checked until it is loaded: it is read once."""
        self._read = str(path), checkpoint

    def __getstate__(self) -> dict[str, object]:
        """Leave the checkpoint behind: a process that is spawned reads it again."""
        return {}

    def save_checkpoint(
        self, checkpoint: Content, path: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint beside its target, then rename it.

        Raises:
            InputError: the file cannot be written; an old one stays as it was. Or a state could not
                be read again; the checkpoint is then written without it, to keep the run's work.
        """
        path = Path(path)
        problems = unreadable(checkpoint)
        if not problems:
            _write(checkpoint, path)
            return

        # The run's other work is saved before the error ends it.
        problem = explained(problems, self.owners or {})
        reduced = without(checkpoint, problems)
        if reduced is None:
            raise InputError(f"{problem}; {path} is not written")
        _write(reduced, path)
        raise InputError(f"{problem}; {path} is saved without this")

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> Content:
        """Return the kept checkpoint, or read one onto the CPU without running code of it."""
        already_read = self._read
        self._read = None
        if already_read is not None and already_read[0] == str(path):
            return already_read[1]
        return read_checkpoint_file(path)


def _write(checkpoint: Content, path: Path) -> None:
    """Write a checkpoint of which all parts can be read."""
    try:
        # A run that was killed may have left one. Only the first rank writes.
        remove_partial(path)
        with written_whole(path) as partial:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
            # A file that no command reads replaces none.
            read_checkpoint_file(partial, mmap=True)
    except (OSError, RuntimeError) as error:
        # PyTorch raises a RuntimeError of its own while it handles that of the file.
        reason = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
        if reason is None:
            raise

        problem = f"{path} cannot be written: {first_line(reason)}"
        if path.is_file():
            problem += "; the one from before is kept"
        raise InputError(problem) from error


def read_training(path: str | Path, to_resume: bool = False) -> Content:
    """Read and check a training's checkpoint; its tensors stay on the disk.

    Args:
        path: the file.
        to_resume: ask for what a fit needs, too.
    """
    checkpoint = read_checkpoint_file(path, mmap=True)
    if to_resume and AVERAGE_KEY in checkpoint:
        problem = "it is an average that was made after a training"
        raise InputError(f"{path} cannot be resumed from: {problem}")

    missing = [name for name in NEEDED if name not in checkpoint]
    use = "be used" if missing or not to_resume else "be resumed from"
    if to_resume:
        missing += [name for name in NEEDED_BY_FIT if name not in checkpoint]
    if missing:
        parts = " and no ".join(missing)
        raise InputError(f"{path} cannot {use}: the checkpoint has no {parts}")

    for name, value in checkpoint["state_dict"].items():
        if not value.isfinite().all():
            raise InputError(f"{path} has weights that are not finite: {name}")
    return checkpoint
