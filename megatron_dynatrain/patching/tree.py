"""A Megatron-LM source tree and the patch for its release: what state it is in, and changing it all or not at all."""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_dynatrain.errors import PatchError
from megatron_dynatrain.patching import diff

RELEASE = "megatron/core/package_info.py"  # says which release a tree is, as MAJOR, MINOR and PATCH
APPLIED, FITS, HALF, FOREIGN = "applied", "fits", "half", "foreign"


@dataclass(frozen=True, slots=True)
class Patch:
    """The patch of `patches/<name>/`."""

    name: str  # core_v0.19.0, Megatron's tag
    files: tuple[diff.FileDiff, ...]


def known() -> dict[tuple[int, int], Patch]:
    """The patches by (major, minor) of the release that they are for."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "patches", package.parent / "patches"):  # installed, and in a checkout of this package
        paths = sorted(folder.glob("core_v*/dynatrain.patch"))
        if paths:
            return {_numbers(path.parent.name): Patch(path.parent.name, diff.parse(path.read_bytes())) for path in paths}
    raise PatchError(f"no patches were found in {package / 'patches'} or {package.parent / 'patches'}; install "
                     "megatron_dynatrain anew, or run it from a checkout of its repository")


def _numbers(name: str) -> tuple[int, int]:
    major, minor, _ = name.removeprefix("core_v").split(".", 2)
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class _Place:
    """A hunk in a tree: whether it is applied there, whether it could be, and why not."""

    name: str
    applied: bool
    fits: bool
    obstacle: str

    def __str__(self) -> str:
        return f"  {self.name}: " + ("is applied" if self.applied else "fits" if self.fits else f"differs, {self.obstacle}")


class Tree:
    """A source tree. `patch` is the one for its release, `state` one of APPLIED, FITS (as the release has it), HALF (some
    of the patch is in it) and FOREIGN (a place that the patch changes is changed otherwise).

    Raises PatchError for a folder that is no tree of Megatron, and for a release without a patch.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.release = self._release()
        patches = known()
        self.patch = patches.get(tuple(map(int, self.release.split(".")[:2])))
        if self.patch is None:
            raise PatchError(f"{root} is Megatron {self.release}, and no patch fits it: there are patches for "
                             f"{', '.join(patch.name for patch in patches.values())}; check one of these out, or start the job "
                             "with the launcher (python -m megatron_dynatrain.launch)")
        self._content = {file.path: self._read(file.path) for file in self.patch.files}
        self._places = [self._look(file, number, hunk)
                        for file in self.patch.files for number, hunk in enumerate(file.hunks, 1)]
        self.state = self._state()

    def _release(self) -> str:
        text = self._read(RELEASE).decode(errors="replace")
        found = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
        if None in found:
            raise PatchError(f"{self.root / RELEASE} does not say MAJOR, MINOR and PATCH, so the release of this tree is not "
                             "known; take the file as Megatron's tag has it")
        return ".".join(match[1] for match in found)

    def _read(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise PatchError(f"{self.root} is no source tree of Megatron-LM: {path} cannot be read ({error.strerror}); give the "
                             "folder that has megatron/ in it") from error

    def _look(self, file: diff.FileDiff, number: int, hunk: diff.Hunk) -> _Place:
        lines = self._content[file.path].splitlines(keepends=True)
        return _Place(f"{file.path}, hunk {number} (line {hunk.line} of the release)", diff.is_in(lines, hunk.new),
                      diff.is_in(lines, hunk.old), diff.obstacle(lines, hunk))

    def _state(self) -> str:
        if all(place.applied for place in self._places):
            return APPLIED
        if any(place.applied for place in self._places):
            return HALF
        return FITS if all(place.fits for place in self._places) else FOREIGN

    def describe(self) -> str:
        """The state in words, with the places that keep the patch from being applied or reverted."""
        name = self.patch.name
        if self.state == APPLIED:
            return f"{self.root} is Megatron {self.release}: {name} is applied"
        if self.state == FITS:
            return f"{self.root} is Megatron {self.release}: {name} fits, and is not applied"
        what = {HALF: f"{name} is half applied", FOREIGN: f"{name} does not fit"}[self.state]
        lines = [f"{self.root} is Megatron {self.release}: {what}, and nothing was changed:", *map(str, self._places)]
        lines.append(f"Put these files back as {name} has them (git checkout {name} -- {' '.join(self._content)}), or make the "
                     f"changes of patches/{name}/dynatrain.patch by hand")
        return "\n".join(lines)

    def apply(self) -> None:
        """Apply the patch. Raises PatchError unless it fits; a tree that has it already stays as it is."""
        if self.state != APPLIED:
            self._change(FITS, revert=False)

    def revert(self) -> None:
        """Take the patch out. Raises PatchError unless it is applied; a tree without it stays as it is."""
        if self.state != FITS:
            self._change(APPLIED, revert=True)

    def _change(self, wanted: str, revert: bool) -> None:
        if self.state != wanted:
            raise PatchError(self.describe())
        write_all({self.root / file.path: diff.replaced(self._content[file.path], file.hunks, revert) for file in self.patch.files})


def write_all(contents: dict[Path, bytes]) -> None:
    """Give every file its new content, or none of them: they are written beside the old ones, and take their places at the end.

    Raises PatchError for what cannot be written.
    """
    written: dict[Path, Path] = {}
    kept = {path: path.read_bytes() for path in contents}
    done = []
    try:
        for path, content in contents.items():
            written[path] = _beside(path, content)
        for path, new in written.items():
            os.replace(new, path.resolve())
            done.append(path)
    except OSError as error:
        for path in done:
            path.write_bytes(kept[path])
        raise PatchError(f"{error.filename or path} cannot be written ({error.strerror}); nothing was changed") from error
    finally:
        for new in written.values():
            new.unlink(missing_ok=True)


def _beside(path: Path, content: bytes) -> Path:
    """A new file in the folder of `path`, with its permissions."""
    target = path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        shutil.copymode(target, name)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
