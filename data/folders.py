"""Files in folders: each real file once, and a record of what was skipped."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from errors import UserError

LFS_POINTER, LFS_MOST_BYTES = b"version https://git-lfs.github.com/spec/", 1024
NAMED = 3  # examples of each reason to skip


def real_files(
    places: Iterable[Path], endings: tuple[str, ...], without: Collection[str] = ()
) -> tuple[list[Path], dict[str, list[Path]]]:
    """Return the files with one of `endings` at or below `places`, sorted, and the skipped files by reason.

    Follow symbolic links, but take each file and folder once. Skip hidden files and folders below the places. Also skip
    folders whose names are in `without`; these are not recorded. Return broken links too: their reader refuses them.
    """
    files, skipped, visited, seen = [], defaultdict(list), set(), set()

    def is_again(path: Path) -> bool:
        status = path.stat()
        known = (status.st_dev, status.st_ino) in seen
        seen.add((status.st_dev, status.st_ino))
        if known:
            skipped["the same again"].append(path)
        return known

    def visit(path: Path) -> None:
        if path in visited:
            return
        visited.add(path)
        if path.is_dir():
            for inner in sorted(path.iterdir()) if not is_again(path) else ():
                if inner.name.startswith("."):
                    skipped["hidden"].append(inner)
                elif inner.name not in without:
                    visit(inner)
        elif not path.name.endswith(endings):
            skipped["of another type"].append(path)
        elif path.is_file():
            if not is_again(path):
                files.append(path)
        elif path.exists():
            skipped["of another type"].append(path)
        elif not (path.parent.resolve() / path.name).exists():  # a pattern with ** follows loops until a path fails
            files.append(path)

    for place in places:
        try:
            visit(place)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}); fix or remove it") from error
    return sorted(files), skipped


def describe(skipped: dict[str, list[Path]]) -> str:
    """Return the numbers and some names of skipped files: "2 hidden (.git, ._a.txt), 1 of another type (a.md)"."""
    parts = []
    for reason, paths in skipped.items():
        names = ", ".join(path.name for path in paths[:NAMED]) + (", ..." if len(paths) > NAMED else "")
        parts.append(f"{len(paths):,} {reason} ({names})")
    return ", ".join(parts)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file only names a large file that Git LFS has not fetched."""
    if path.stat().st_size > LFS_MOST_BYTES:
        return False
    return path.read_bytes().startswith(LFS_POINTER)
