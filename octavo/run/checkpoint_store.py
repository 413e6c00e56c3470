"""Step checkpoints: whole or not there, found again after any crash, and servable as they are.

A checkpoint directory `step-00000010` holds model/ (a Hugging Face checkpoint in high precision with its tokenizer),
trainer.safetensors (masters, moments, delayed-scaling buffers, random-number state), trainer.json (step, config,
architecture, numerics) and manifest.json (every file's size and SHA-256). LATEST beside them names the newest. Where
several ranks save, trainer/ takes the place of trainer.safetensors: the shards, by torch.distributed.checkpoint.
"""

import dataclasses
import functools
import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from octavo import __version__
from octavo.distributed.outcome import all_do, is_first, place_in, together
from octavo.errors import CheckpointError, ConfigError, StorageError
from octavo.models import Decoder
from octavo.models.checkpoint.atomic import shared_directory
from octavo.models.checkpoint.storage import writing
from octavo.models.export import ModelExport
from octavo.models.tokenizer import Tokenizer, tokenizer_fingerprint
from octavo.parallel.checkpoint import UNCUT, Cuts, load_state, save_state
from octavo.parallel.checkpoint import load_file as load_rows
from octavo.parallel.staging import HostCopies
from octavo.run.atomic import remove_directory, remove_leftovers, write_atomic
from octavo.run.manifest import MANIFEST, find_damage, make_manifest

if TYPE_CHECKING:
    from octavo.distributed.mesh import Mesh  # a config section, whose library takes a while to import

LATEST = "LATEST"
MODEL_DIR = ModelExport.folder
SHARDS = "trainer"
_STATE, _DESCRIPTION = "trainer.safetensors", "trainer.json"
_PREFIX = "step-"
BUFFER = "buffer."  # begins the names of a state's tensors that others than the optimizer write
_Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole.

    Attributes:
        path: its directory.
        description: trainer.json.
        group: the process group that reads it; None for one process.
    """

    path: Path
    description: dict[str, Any]
    group: Any = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.description["step"])

    def load_state(self, like: Mapping[str, torch.Tensor] | None = None, cuts: Cuts = UNCUT) -> dict[str, torch.Tensor]:
        """The state that was saved, by one process or by any number of ranks; a collective of the store's mesh.

        Args:
            like: this run's state, whose values are replaced in place; each rank reads its rows of a DTensor alone.
                Names that it lacks are left out. None reads everything, whole, to the CPU.
            cuts: where those lie that are slices of tensor-parallel ranks.
        Returns:
            name -> tensor, of `like` itself; a plain one that was saved in another shape or dtype as it was saved.
        Raises:
            CheckpointError: it cannot be read; a sharded or cut tensor was saved in another shape or dtype.
        """
        own: dict[str, torch.Tensor] = {}
        together(self.group, lambda: own.update(self._read(like, cuts)))
        return own

    def _read(self, like: Mapping[str, torch.Tensor] | None, cuts: Cuts) -> dict[str, torch.Tensor]:
        if (self.path / SHARDS).is_dir():
            return load_state(self.path / SHARDS, like, cuts)
        if like is not None:
            return load_rows(self.path / _STATE, like, cuts)
        try:
            return load_file(self.path / _STATE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / _STATE} cannot be read: {error}") from None


class CheckpointStore:
    """The checkpoints of one run.

    With a mesh of several ranks, save, wait, find_latest and Checkpoint.load_state are collectives: all ranks call
    them, with the same step, and what one of them raises all raise. A rank that is killed leaves the older checkpoints.
    Before another store looks into the folder, call wait: it takes a save under way for a leftover.

    Args:
        root: their directory; made at the first save; on a file system that all ranks share.
        keep: how many of the newest stay.
        mesh: of the job; None for one process.
        is_async: save copies and returns; a thread writes the copies. They take as much of the host's memory as the
            state and the parameters have on this rank's device.
        optimizer: that alone changes parameters and state on a GPU, of those with 1 MiB and more on a rank. A save in
            the background then returns while they are copied, and the optimizer's next step waits for that, on the GPU.
            None: save returns when all is copied.
    """

    def __init__(
        self,
        root: Path,
        keep: int = 2,
        mesh: "Mesh | None" = None,
        *,
        is_async: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.root = root
        self.keep = keep
        self._group = self._readers = None if mesh is None else mesh.host_group
        if is_async and mesh is not None:
            self._group = mesh.new_host_group()  # a thread's collectives must not meet those of training
        self._copies = HostCopies()
        self._is_open = is_async and optimizer is not None
        if is_async and optimizer is not None:
            copies = weakref.ref(self._copies)
            hook = optimizer.register_step_pre_hook(lambda *_: _hold_writes(copies))
            weakref.finalize(self, hook.remove)
        # not a daemon: a process that ends lets it finish what it began
        self._background = ThreadPoolExecutor(1, "octavo-checkpoint") if is_async else None
        self._pending: Future[Any] | None = None

    def save(
        self,
        description: Mapping[str, Any],
        state: Mapping[str, torch.Tensor],
        write_model: Callable[[Path], None] | ModelExport,
        cuts: Cuts = UNCUT,
    ) -> Path:
        """Write a checkpoint; a kill at any moment leaves the older ones and LATEST as they were.

        Args:
            description: plain JSON values; "step" names the directory.
            state: name -> tensor; DTensors are written by their shards, those of `cuts` by their pieces, others must be
                equal on all ranks.
            write_model: writes the servable checkpoint into the (new) directory that it is given. Several ranks, and
                saves in the background, take a ModelExport.
            cuts: where those of `state` lie that are slices of tensor-parallel ranks (MasterAdamW.state_cuts).
        Returns:
            The checkpoint's directory, which a save in the background makes later.
        Raises:
            StorageError: the disk refuses it; the message names the last good checkpoint, which stays. The same on all
                ranks. Of a save in the background at the next save or wait.
        """
        self.wait()
        if not isinstance(write_model, ModelExport) and (self._group is not None or self._background is not None):
            raise ConfigError("several ranks, and saves in the background, write a model through a ModelExport")
        path = self.path_of(description["step"])
        parameters = write_model.tensors if isinstance(write_model, ModelExport) else {}
        if self._background is None:
            self._save(path, description, state, cuts, write_model, parameters)
            return path
        # where one rank lacks the memory none saves
        others = {name: tensor for name, tensor in state.items() if name.startswith(BUFFER)}
        copy = functools.partial(self._copies.copy, state, parameters, is_open=self._is_open, at_once=others)
        state, parameters = all_do(self._group, copy)
        written = (path, dict(description), state, cuts, write_model, parameters)
        self._pending = self._background.submit(self._save_copies, *written)
        return path

    def reserve(self, state: Mapping[str, torch.Tensor], model: ModelExport) -> None:
        """Take the memory of saves in the background before the first one, which then does not wait for it."""
        if self._background is not None:
            self.wait()
            reserve = functools.partial(self._copies.reserve, state, model.tensors)
            self._pending = self._background.submit(all_do, self._group, reserve)

    def wait(self) -> None:
        """Wait until the last save is on disk; call it at the end of a run, before the process group ends.

        Raises:
            StorageError: as save.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _save_copies(self, *written: Any) -> None:
        self._copies.wait()
        self._save(*written)

    def _save(
        self,
        path: Path,
        description: Mapping[str, Any],
        state: _Tensors,
        cuts: Cuts,
        write_model: Callable[[Path], None] | ModelExport,
        parameters: _Tensors,
    ) -> None:
        try:
            with shared_directory(path, lambda _: True, self._group) as directory:
                if isinstance(write_model, ModelExport):
                    write_model.write(directory / write_model.folder, parameters, self._group)
                else:
                    write_model(directory / MODEL_DIR)
                self._write_state(directory, state, cuts)
                self._write_descriptions(directory, description)
            together(self._group, lambda: self._point_to(path) if is_first(self._group) else None)
        except StorageError as error:
            last = self.newest()
            left = "there is no earlier one" if last is None else f"the last good one is {last}"
            raise StorageError(error.errno, f"checkpoint of step {description['step']}: {error}; {left}") from error

    def _write_state(self, directory: Path, state: _Tensors, cuts: Cuts) -> None:
        if self._group is not None:
            save_state(state, directory / SHARDS, self._group, cuts)
            return
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, directory / _STATE)

    def _write_descriptions(self, directory: Path, description: Mapping[str, Any]) -> None:
        """trainer.json, and the manifest of what all ranks wrote."""
        group = self._group
        names = together(group, lambda: _describe(directory, description) if is_first(group) else [])[0]
        rows: dict[str, Any] = {}
        for own in together(group, lambda: make_manifest(directory, names, *place_in(group))):
            rows |= own
        rows = dict(sorted(rows.items(), key=lambda row: Path(row[0])))
        together(group, lambda: _write_json(directory / MANIFEST, rows) if is_first(group) else None)

    def _point_to(self, path: Path) -> None:
        write_atomic(self.root / LATEST, path.name + "\n")
        self._prune(path)

    def path_of(self, step: int) -> Path:
        """The directory of a step's checkpoint."""
        return self.root / f"{_PREFIX}{step:08d}"

    def newest(self) -> Path | None:
        """The checkpoint that LATEST names, unread; None where there is none."""
        path = self._named()
        return path if path is not None and path.is_dir() else None

    def find_latest(self) -> Checkpoint | None:
        """The checkpoint that LATEST names, or else the newest whole one; the first rank decides for all.

        Returns:
            None where the run has no checkpoint at all.
        Raises:
            CheckpointError: there are checkpoints and every one of them is damaged.
        """
        self.wait()  # what is under way looks like a leftover
        found = together(self._group, lambda: self._find_latest() if is_first(self._group) else None)[0]
        return None if found is None else dataclasses.replace(found, group=self._readers)

    def _find_latest(self) -> Checkpoint | None:
        remove_leftovers(self.root)
        candidates = self._candidates()
        for path in candidates:
            damage = find_damage(path)
            if damage is None:
                return Checkpoint(path, json.loads((path / _DESCRIPTION).read_text(encoding="utf-8")))
            warnings.warn(f"checkpoint {path} is skipped: {damage}; trying an older one", stacklevel=2)
        if candidates:
            raise CheckpointError(
                f"no checkpoint under {self.root} is whole ({len(candidates)} tried); start over with --no-resume"
            )
        return None

    def _prune(self, newest: Path) -> None:
        """Remove what is too old, and what a run that was set back to an older step left ahead of it."""
        ahead = [path for path in self._directories() if path.name > newest.name]
        for path in (*ahead, *self._directories()[len(ahead) + self.keep :]):
            remove_directory(path)

    def _candidates(self) -> list[Path]:
        """LATEST's first, then the others from new to old."""
        directories, named = self._directories(), self._named()
        if named in directories:
            directories.remove(named)
            directories.insert(0, named)
        elif named is not None:
            text = f"{self.root / LATEST} names {named.name}, which is not there; trying the newest one"
            warnings.warn(text, stacklevel=3)
        return directories

    def _named(self) -> Path | None:
        """What LATEST names, whatever bytes it holds; None where there is none."""
        pointer = self.root / LATEST
        return self.root / pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None

    def _directories(self) -> list[Path]:
        """All step directories, from new to old."""
        return sorted((path for path in self.root.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)


def _hold_writes(copies: "weakref.ref[HostCopies]") -> None:
    if (found := copies()) is not None:
        found.hold_writes()


def describe_model(model: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Versions, architecture and tokenizer."""
    architecture = dataclasses.asdict(model.config)
    return {
        "octavo": __version__,
        "torch": torch.__version__,
        "architecture": {key: list(x) if isinstance(x, tuple) else x for key, x in architecture.items()},
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The keys of `after`, a nested mapping, whose values are others in `before`.

    Returns:
        dotted key -> "key was ..., is ...", for a person.
    """
    theirs, ours = dict(flatten(before)), dict(flatten(after))
    return {key: f"{key} was {theirs.get(key)!r}, is {new!r}" for key, new in ours.items() if theirs.get(key) != new}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a nested mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _describe(directory: Path, description: Mapping[str, Any]) -> list[str]:
    """Write trainer.json; the names of all files but the manifest, in order."""
    _write_json(directory / _DESCRIPTION, description)
    return [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
