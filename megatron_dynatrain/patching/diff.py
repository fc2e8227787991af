"""Unified diffs, applied exactly: every line of context must be there, wherever in the file. No fuzz, no other program.

A hunk is a run of lines that becomes another run of lines. Reverting is the same the other way round, so that it gives
back the very bytes.

    @@ -3,2 +3,3 @@           Hunk(line=3, old=(b"a\\n", b"b\\n"), new=(b"a\\n", b"x\\n", b"b\\n"))
     a
    +x
     b
"""

import re
from dataclasses import dataclass

from megatron_dynatrain.errors import PatchError

_HEADER = re.compile(rb"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines of a file with their line ends: `old` before the patch, `new` after it. line: where `old` began, from 1."""

    line: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a patch changes in the file at `path`, which is relative to the root of the tree; hunks in the order of lines."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: bytes) -> tuple[FileDiff, ...]:
    """The files of a unified diff (paths with a/ and b/ in front); text before the first file is a comment.

    Files are changed, not made, removed or renamed. Raises PatchError for what cannot be read so.
    """
    files: list[tuple[str, list]] = []
    for line in text.splitlines(keepends=True):
        header = _HEADER.match(line)
        if line.startswith(b"+++ b/"):
            files.append((line[6:].strip().decode(), []))
        elif header and files:
            files[-1][1].append((int(header[1]), [], []))
        elif files and files[-1][1] and not line.startswith(b"--- a/"):
            _, old, new = files[-1][1][-1]
            sign, rest = line[:1], line[1:]
            if sign not in (b" ", b"-", b"+"):
                raise PatchError(f"the line {line!r} of the patch is no line of a unified diff; take the patch anew")
            if sign != b"+":
                old.append(rest)
            if sign != b"-":
                new.append(rest)
    return tuple(FileDiff(path, tuple(Hunk(line, tuple(old), tuple(new)) for line, old, new in hunks)) for path, hunks in files)


def positions(lines: list[bytes], wanted: tuple[bytes, ...]) -> list[int]:
    """Where a run of lines stands in a file: the index of its first line, for each place."""
    count = len(wanted)
    return [i for i, line in enumerate(lines) if line == wanted[0] and tuple(lines[i:i + count]) == wanted]


def is_in(lines: list[bytes], wanted: tuple[bytes, ...]) -> bool:
    """Whether a run of lines stands in a file at one place, and one only."""
    return len(positions(lines, wanted)) == 1


def replaced(content: bytes, hunks: tuple[Hunk, ...], revert: bool = False) -> bytes:
    """`content` with the old lines of every hunk replaced by the new ones, or the new ones by the old ones.

    All lines that are to be replaced must stand in it once (see `is_in`).
    """
    lines = content.splitlines(keepends=True)
    for hunk in hunks:
        before, after = (hunk.new, hunk.old) if revert else (hunk.old, hunk.new)
        at, = positions(lines, before)
        lines[at:at + len(before)] = after
    return b"".join(lines)


def obstacle(lines: list[bytes], hunk: Hunk) -> str:
    """Why the old lines of a hunk are not found once, for messages."""
    found = positions(lines, hunk.old)
    if found:
        return f"its lines stand there {len(found)} times, at lines {', '.join(str(i + 1) for i in found)}"
    missing = next((line for line in hunk.old if line not in lines), None)
    if missing is None:
        return "its lines are there, but not next to one another"
    return f"it expects the line {missing.decode(errors='replace').rstrip()!r}"
