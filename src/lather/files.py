"""Texts that are read, files that are replaced atomically, folders that appear only when they are
complete, locks of folders, files of JSON, and checksums."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from lather.errors import ExchangeError, RunError, UserError

StrPath = str | os.PathLike[str]
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Encodings by byte-order mark; a longer mark comes before its own prefix."""


class Readable(Protocol):
    """A path, or a file of a package (`importlib.resources`)."""

    def read_bytes(self) -> bytes: ...


def mark_of(start: bytes) -> bytes:
    """Return the byte-order mark at the start of these bytes; empty if there is none."""
    return next((mark for mark in BYTE_ORDER_MARKS if start.startswith(mark)), b"")


def read_text(file: Readable, errors: str = "strict") -> str:
    """Read a text file with the line ends "\\n", "\\r\\n" or "\\r", which become "\\n".

    Its encoding is that of its byte-order mark, which is dropped, or else UTF-8. Characters are not
    normalized. `errors`: as in `bytes.decode`.

    Raises OSError, or UnicodeError, whose message says where the text is not valid and what helps.
    """
    content = file.read_bytes()
    mark = mark_of(content)
    content, encoding = content[len(mark) :], BYTE_ORDER_MARKS.get(mark, "utf-8")
    try:
        text = content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        line = content[: error.start].decode(encoding, "replace").count("\n") + 1
        place = f"byte {content[error.start]:#04x} in line {line}"
        raise UnicodeError(f"not {encoding.upper()}: {place}; save it as UTF-8") from None
    if "\0" in text and errors == "strict":
        kinds = "as binary files do, and UTF-16 without a byte-order mark"
        raise UnicodeError(f"it has zero bytes, {kinds}; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk, and of a user's exhausted quota."""
OF_WRITES = {
    **dict.fromkeys(NO_SPACE, "make room"),
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f, or that of the file system)",
    errno.EROFS: "make the disk writable, or use another one",
    errno.EIO: "check the disk, or use another one",
}
"""Remedies by the numbers of the errors that a disk may give to a write at any moment."""
REMEDIES = {
    **OF_WRITES,
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its owner or mode, or use another place"),
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ESTALE: "mount the network's disk again",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n hard)"),
}
"""Also those of the errors that name the file or folder for which they are."""


def remedy_of(error: OSError) -> str:
    """Return what helps against the error; empty if it need not be that of a file or a disk."""
    is_of_file = error.errno in OF_WRITES or error.filename is not None
    return REMEDIES.get(error.errno or 0, "") if is_of_file else ""


def unreadable(file: Path, error: Exception) -> str:
    """Say that a file, which may be whole, cannot be read, and what helps; return an empty text if
    the error says nothing of the kind."""
    if isinstance(error, OSError) and (remedy := remedy_of(error)):
        return f"{file}: cannot be read ({error.strerror}): {remedy}"
    return ""


@contextlib.contextmanager
def names_failing_disk(path: Path) -> Iterator[None]:
    """Raise the OSError of a disk (`OF_WRITES`) in the block with the name `path`: that of a write
    has no name, and that of a copy the source's."""
    try:
        yield
    except OSError as error:
        if error.errno in OF_WRITES:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def delete_folder(folder: Path) -> None:
    """Delete a folder. Raises OSError with its name, for any file in it."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno is None:  # it is a link
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def reason(error: OSError, path: Path) -> str:
    """Say why the file or folder cannot be written: the error's text, and the bytes that are free
    if the disk is full."""
    text = error.strerror or str(error)
    if error.errno not in NO_SPACE:
        return text
    return f"{text}: {shutil.disk_usage(nearest_folder(path)).free:,} bytes are free there"


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Return a checksum of a value that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def nearest_folder(path: Path) -> Path:
    """Return the path itself or, if it does not exist, its nearest parent that does."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def check_space(needed: Mapping[Path, int], subject: str) -> None:
    """Raise UserError if a disk has fewer free bytes than are to be written to its folders.
    `needed`: bytes by folder; `subject`: begins the message."""
    of_disks = Counter[int]()
    places: dict[int, Path] = {}
    for folder, num_bytes in needed.items():
        place = nearest_folder(folder)
        of_disks[place.stat().st_dev] += num_bytes
        places.setdefault(place.stat().st_dev, place)
    for disk, num_bytes in of_disks.items():
        if (free := shutil.disk_usage(places[disk]).free) < num_bytes:
            raise UserError(
                f"{subject}: needs {num_bytes / 1e9:,.2f} GB on the disk of {places[disk]}, where "
                f"{free / 1e9:,.2f} GB are free: free some space, or use another disk"
            )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the file at the end of the block; after an error it is
    removed."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _encoded(text: str, path: Path) -> bytes:
    """Encode the text of a file. Raises UserError for a name of a file or folder in it that is not
    UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].rpartition("\n")[2] + text[error.start :].partition("\n")[0]
        raise UserError(f"{path}: {line.strip()} is not UTF-8: rename the file or folder") from None


def write_aside(path: Path, content: str | bytes) -> None:
    """Replace the file atomically; if that fails, delete what was written. Raises UserError if a
    name in the content is not UTF-8."""
    encoded = _encoded(content, path) if isinstance(content, str) else content
    with names_failing_disk(path), replaced(path) as aside:
        aside.write_bytes(encoded)
        sync(aside)
    sync(path.parent)


@contextlib.contextmanager
def whole_file(out: Path, option: str) -> Iterator[Path]:
    """Yield a temporary file that replaces the file `out`, which `option` names, at the end; after
    an error it is removed. A link stays and the file that it names is replaced. A device or a pipe
    is not replaced: it is yielded itself.

    Raises UserError if `out` cannot be written.
    """
    target = Path(os.path.realpath(out))
    is_device = out.exists() and not target.is_file()
    try:
        with contextlib.nullcontext(out) if is_device else replaced(target) as aside:
            yield aside
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({reason(error, out)}): give another {option}"
        ) from None


def check_new_folder(target: Path) -> None:
    """Raise ExchangeError if `target` exists and is not an empty folder."""
    place = Path(os.path.realpath(target))
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ExchangeError(
            f"{target}: exists already and is not an empty folder: give another place, or delete it"
        )


@contextlib.contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to; at the end of the context it is synced and renamed to `target`.
    After an exception or a kill `target` does not exist.

    Raises ExchangeError if `target` exists and is not an empty folder, if it cannot be written, or
    if another process is writing it."""
    check_new_folder(target)
    place = Path(os.path.realpath(target))
    aside = place.with_name(f".tmp-{place.name}")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
    except OSError as error:
        raise ExchangeError(
            f"{target}: cannot be written ({reason(error, place)}): give another place"
        ) from None
    try:
        _take(lock, aside, target)
        try:
            with names_failing_disk(target):
                yield aside
                for path in (*aside.rglob("*"), aside):
                    sync(path)
                aside.rename(place)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full
            raise
        sync(place.parent)
    finally:
        os.close(lock)


def _take(lock: int, aside: Path, target: Path) -> None:
    """Lock the folder, and delete files in it that a killed process has left."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(lock), os.stat(aside))
    except OSError:  # locked, or renamed or removed meanwhile
        is_ours = False
    if not is_ours:
        raise ExchangeError(
            f"{target}: another process is writing it: wait for it, or give another place"
        )
    for leftover in aside.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


LOCK = ".lock"
"""File in a folder that is locked."""


def lock_folder(folder: Path, name: str, option: str) -> IO[str]:
    """Make a folder and lock it for this process and those that it forks, until all of them have
    closed the returned file, which the caller has to keep. Raises RunError, with the folder's
    `name` and the `option` that names another, if it is in use or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise RunError(
            f"{name} cannot be written ({reason(error, folder)}): give another {option}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(
            f"{name} is in use by another process: wait for it, or give another {option}"
        ) from None
    return lock


def write_json(file: Path, content: Mapping[str, Any], indent: int = 2) -> None:
    file.write_text(json.dumps(content, indent=indent) + "\n", "utf-8")


def write_numbers(out: Path, content: Mapping[str, Any]) -> None:
    """Write the file that `--json` names. Raises UserError if it cannot be written."""
    with whole_file(out, "--json") as aside:
        write_json(aside, content, indent=1)


def read_rows(
    path: Path, lacks: Callable[[Mapping[str, Any]], str] = lambda row: ""
) -> list[dict[str, Any]]:
    """Read the rows of a file such as `metrics.jsonl`; an incomplete last line, left by a killed
    process, is skipped. `lacks` names the field that a row lacks; empty: none.

    Raises RunError, with file and line number, for any other line that is not a row.
    """
    if not path.exists():
        return []
    rows = []
    lines = read_text(path, errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
            missing = lacks(row)
            fault = missing and f" (it has no {missing})"
        except (ValueError, KeyError, TypeError, OverflowError):
            row, fault = {}, ""
        if row and not fault:
            rows.append(row)
        elif number < len(lines):
            raise RunError(
                f"{path}, line {number}: not a row of metrics{fault}: restore the file, or start "
                "again in another run directory"
            )
    return rows


@contextlib.contextmanager
def optional_file(
    file: Path, note: Callable[[str], None], end: str = ": the run goes on without it"
) -> Iterator[None]:
    """Write a file on which nothing depends in the block; if it cannot be written, only say so with
    `note`, in a sentence with this `end`."""
    try:
        yield
    except UserError as error:  # that of a command whose --out cannot be written
        cause = error.__context__
        why = reason(cause, file) if isinstance(cause, OSError) else str(error)
        note(f"{file} cannot be written ({why}){end}")
    except OSError as error:
        note(f"{file} cannot be written ({reason(error, file)}){end}")
