"""A folder per step, its manifest last, by rename: whatever moment a run dies at, the last whole checkpoint is found again."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ragen_agent.records import sync_folder, write_json

MANIFEST = "manifest.json"  # {file: {"size": bytes, "sha256": hex}} of every other file in the folder
NAME = re.compile(r"step-(\d{6,})")


def save(run: Path, step: int, write: Callable[[Path], None], keep: int = 2, before: int | None = None) -> Path:
    """Keep what `write(folder)` puts into a folder as `run/step-<step>`, and remove all but the `keep` newest whole ones up to it.

    With `before`, the newest whole one of an earlier step than that stays too, however many have come since.

    The files are written into a hidden folder beside it and flushed to the disk, the manifest last; then the folder is renamed. A step
    that is there already, whole, is left as it is: a run's state after a step is always the same. `keep` below 1 is a ValueError; what
    cannot be written, on a full disk for instance, is an `OSError` that names the last whole checkpoint, which is still there.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    target = run / f"step-{step:06d}"
    if not whole(target):
        try:
            _put(target, write)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors raise the latter two on a full disk
            raise _unsaved(run, step, error) from error
    older = [folder for folder in reversed(steps(run)) if number(folder) < step]
    sound = [folder for folder in older if whole(folder, deep=False)]
    kept = sound[: keep - 1] + [folder for folder in sound if before is not None and number(folder) < before][:1]
    for folder in older:
        if folder not in kept:
            shutil.rmtree(folder)
    return target


def latest(run: Path) -> Path | None:
    """The newest checkpoint in `run` that its manifest vouches for; damaged and unfinished ones are passed over. None: there is none."""
    return next((folder for folder in reversed(steps(run)) if whole(folder)), None)


def steps(run: Path) -> list[Path]:
    """The checkpoint folders of `run`, whole or not, oldest first."""
    return sorted((path for path in run.glob("step-*") if path.is_dir() and NAME.fullmatch(path.name)), key=number)


def number(folder: Path) -> int:
    """The step of a checkpoint folder, out of its name; another name is a ValueError."""
    match = NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"not a checkpoint folder (step-000010): {folder}")
    return int(match[1])


def whole(folder: Path, deep: bool = True) -> bool:
    """Whether every file of the folder's manifest is there, with its size and, if `deep`, its SHA-256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return all(
            (folder / name).stat().st_size == told["size"] and (not deep or _digest(folder / name) == told["sha256"])
            for name, told in manifest.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a file is missing, or the manifest itself is damaged
        return False


def _put(target: Path, write: Callable[[Path], None]) -> None:
    """Write a whole folder in place of what is left of another, or leave none."""
    run, draft = target.parent, target.with_name(f".{target.name}")
    for left in [target, *run.glob(".step-*")]:  # by a save that was killed, or damaged since
        if left.exists():
            shutil.rmtree(left)
    draft.mkdir(parents=True)
    try:
        write(draft)
        _seal(draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # of a save that failed: the disk may be full of it
    sync_folder(run)


def _unsaved(run: Path, step: int, error: Exception) -> OSError:
    """What to tell of a save that failed; it keeps the number of an operating system's error."""
    last = latest(run)
    rest = f"the last whole checkpoint is {last}" if last else "there is no whole checkpoint"
    there = next(folder for folder in [run, *run.absolute().parents] if folder.exists())
    text = f"saving step {step} failed: {error}; {shutil.disk_usage(there).free >> 20} MiB are free in {there}; {rest}"
    return OSError(error.errno, text) if isinstance(error, OSError) and error.errno else OSError(text)


def _seal(folder: Path) -> None:
    """Flush every file and folder in `folder`, then write the manifest."""
    manifest = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        manifest[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
    write_json(folder / MANIFEST, manifest)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
