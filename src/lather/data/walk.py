"""Lists the files of a folder and its subfolders, also linked subfolders, and what it leaves out.

Links are followed, but no file is listed twice: of several paths to a file or folder the path
without links counts, or else the first in the order of names. So the list depends on the tree
alone, and circles of links end.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Numbers of errors of links that lead to nothing."""
MADE = {"dataset.json", "files.jsonl", "skipped.jsonl"}
"""Entries of each folder that `lather data make` has made."""
Links = list[tuple[Path, str]]
"""Links to follow, each with the real path of its folder."""
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


@dataclass
class FolderWalk:
    """The files below a folder, and what is not among them."""

    root: Path
    pattern: str
    """Glob that the names of files match."""
    without: AbstractSet[str]
    """Names of folders that are left out."""
    files: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    """Files whose names do not match."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """Files and folders that cannot be read, or are read by another path: path, reason, detail."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Numbers of hidden files and folders, of folders in `without`, and of data sets."""
    _listed: set[str] = field(default_factory=set)
    """Real paths of the listed files and folders."""

    def list(self) -> None:
        """List everything. Raises OSError if the folder itself cannot be read."""
        os.scandir(self.root).close()
        links = self._list_folder(self.root, os.path.realpath(self.root))
        while links:
            followed, links = sorted(links), []
            for path, folder in followed:
                real = os.path.realpath(path)
                if not os.path.isdir(path):
                    self._add_file(path, real)
                elif os.path.commonpath([folder, real]) == real:
                    self._skip(path, "link to a folder that it is in", real)
                elif self._is_new_folder(path, real):
                    links += self._list_folder(path, real)
        self.files.sort(key=lambda path: path.relative_to(self.root))
        self.skipped.sort()

    def _list_folder(self, folder: Path, real: str) -> Links:
        """List a folder and the folders in it, whose real path is given. Return the links in
        them, which are followed when all the rest is listed."""
        self._listed.add(real)
        try:
            with os.scandir(folder) as iterator:
                entries = sorted(iterator, key=lambda entry: entry.name)
        except OSError as error:
            self._skip(folder, "cannot be read", error.strerror)
            return []
        if folder != self.root and _is_data_set(folder, {entry.name for entry in entries}):
            self.left_out["data set"] += 1
            return []
        links: Links = []
        for entry in entries:
            path, real_path = folder / entry.name, os.path.join(real, entry.name)
            if entry.name.startswith("."):
                self.left_out["hidden"] += 1
            elif entry.is_symlink():
                links.append((path, real))
            elif not entry.is_dir(follow_symlinks=False):
                self._add_file(path, real_path)
            elif self._is_new_folder(path, real_path):
                links += self._list_folder(path, real_path)
        return links

    def _is_new_folder(self, path: Path, real: str) -> bool:
        if path.name in self.without:
            self.left_out[f"folder {path.name}"] += 1
            return False
        return self._is_new(path, real)

    def _add_file(self, path: Path, real: str) -> None:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            is_dangling = error.errno in NOWHERE and path.is_symlink()
            reason = "dangling link" if is_dangling else "cannot be read"
            self._skip(path, reason, os.readlink(path) if is_dangling else error.strerror)
            return
        if not fnmatch.fnmatch(path.name, self.pattern):
            self.others.append(path)
        elif not stat.S_ISREG(mode):
            self._skip(path, "not a file", KINDS.get(stat.S_IFMT(mode)))
        elif not os.access(path, os.R_OK):
            self._skip(path, "cannot be read", os.strerror(errno.EACCES))
        elif self._is_new(path, real):
            self.files.append(path)

    def _is_new(self, path: Path, real: str) -> bool:
        if real in self._listed:
            self._skip(path, "read by another path", real)
            return False
        self._listed.add(real)
        return True

    def _skip(self, path: Path, reason: str, detail: str | None) -> None:
        self.skipped.append((str(path), reason, detail or ""))


def _is_data_set(folder: Path, names: AbstractSet[str]) -> bool:
    """Tell whether a folder with these entries is a data set of `lather data make`, finished or
    not. A data set is not read when it is made of a folder that it is in."""
    return names >= MADE or (folder.suffix == ".partial" and ".lock" in names)
