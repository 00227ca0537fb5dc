"""Models and data sets of a Hugging Face hub, by name, through `huggingface_hub`.

Their files stay in that library's cache, and its variables hold: HF_ENDPOINT (another hub), HF_HOME
(the cache), HF_HUB_OFFLINE (nothing but the cache) and HF_TOKEN, which no message quotes. A
repository is read at one commit: it does not change while it is read, nor between the starts of a
run. The library resumes a download that breaks; after a stop, the same command downloads the files
that are missing.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from lather.errors import UserError
from lather.files import NO_SPACE, check_space

SCHEME = "hf://"
CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""Files in the folder of a model."""
COMMIT = r"[0-9a-f]{40}"
Kind = Literal["model", "dataset"]
REVISION = r"refs/convert/[\w.-]+|refs/pr/\d+|[^/]+"
"""A revision in an address. The slashes of all others are written %2F."""
ADDRESS = re.compile(rf"((?:models|datasets)/)?([\w.-]+/[\w.-]+)(?:@({REVISION}))?(?:/(.*))?")


class HubError(UserError):
    """A repository of a hub is missing, closed to this account, or not reachable."""


@dataclass(frozen=True)
class Address:
    """A repository of a hub at a revision, and files in it, written as fsspec does:
    hf://[datasets/]ORG/NAME[@REVISION][/PATH]."""

    kind: Kind
    name: str
    """ORG/NAME."""
    revision: str = ""
    """Branch, tag or commit; empty: the main branch."""
    path: str = ""
    """File, folder or glob, whose * also matches slashes; empty: the whole repository, as for every
    model."""

    @classmethod
    def parse(cls, text: str, kind: Kind) -> Address:
        """Read the address of a repository of this kind, which need not be written. Raises HubError
        if the text is none, or has a path in a model, of which only the root is read."""
        match = ADDRESS.fullmatch(text.removeprefix(SCHEME))
        path = match[4].strip("/") if match and match[4] else ""
        if (
            match is None
            or match[1] not in (None, f"{kind}s/")
            or {".", ".."}.intersection(match[2].split("/"))
            or (path and kind == "model")
        ):
            raise HubError(
                f"{text}: not the address of a {kind}: it must be like {cls(kind, 'ORG/NAME')}"
            )
        return cls(kind, match[2], unquote(match[3] or ""), path)

    def __str__(self) -> str:
        is_plain = re.fullmatch(REVISION, self.revision) and "%" not in self.revision
        revision = self.revision if is_plain else quote(self.revision, safe="")
        name = f"{self.name}@{revision}" if revision else self.name
        kind = "datasets/" if self.kind == "dataset" else ""
        return f"{SCHEME}{kind}{name}" + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True)
class Repository:
    """The files of a repository at a commit."""

    address: Address
    """The repository, with the commit as its revision."""
    sizes: Mapping[str, int]
    """Bytes of each file."""

    def matching(self, taken: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
        """Return, in order, the files that match a glob of `taken` and none of `left_out`."""
        return sorted(
            name
            for name in self.sizes
            if any(fnmatchcase(name, glob) for glob in taken)
            and not any(fnmatchcase(name, glob) for glob in left_out)
        )

    def missing_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes of those files that have to be downloaded."""
        where = {"revision": self.address.revision, "repo_type": self.address.kind}
        find, name_of = _library().try_to_load_from_cache, self.address.name
        return sum(
            self.sizes[name] for name in names if not isinstance(find(name_of, name, **where), str)
        )

    def fetch(self, taken: Sequence[str], left_out: Sequence[str] = ()) -> Path:
        """Download the matching files that are not in the cache; return the folder in which they
        have their names.

        Raises UserError, before anything is downloaded, if the disk is too small, and HubError if a
        file cannot be had."""
        if missing := self.missing_bytes(self.matching(taken, left_out)):
            check_space({cache_folder(): missing}, str(self.address))
        with _errors_at(self.address):
            folder = _library().snapshot_download(
                self.address.name,
                repo_type=self.address.kind,
                revision=self.address.revision,
                allow_patterns=[*taken],
                ignore_patterns=[*left_out],
                tqdm_class=_bar_of_a_terminal(),
            )
        return Path(folder)


def pinned(address: Address) -> Address:
    """Return the address with the commit that its revision is now at the hub or, if that is not
    reachable, was in the cache. Raises HubError if it is unknown."""
    hub = _library()
    with _errors_at(address):
        revision = hub.HfApi().resolve_revision(
            address.name,
            repo_type=address.kind,
            revision=address.revision or None,
            local_files_only=hub.is_offline_mode(),
        )
    return replace(address, revision=revision.resolved)


def open_repository(address: Address) -> Repository:
    """List the files of a repository at the commit of its revision. Raises HubError if it cannot be
    read, and is not in the cache either."""
    hub, address = _library(), pinned(address)
    where = {"repo_type": address.kind, "revision": address.revision}
    with _errors_at(address):
        try:
            files = hub.get_cached_repo_tree(address.name, **where)
        except hub.errors.CachedRepoTreeNotFoundError:
            files = hub.HfApi().list_repo_tree(address.name, recursive=True, **where)
        return Repository(
            address, {file.path: file.size for file in files if hasattr(file, "size")}
        )


def cache_folder() -> Path:
    """Return the folder to which files are downloaded."""
    return Path(_library().constants.HF_HUB_CACHE)


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise HubError(
            "huggingface_hub is needed to read from a hub, and is not installed: "
            "pip install 'lather[hf]'"
        ) from None


def _bar_of_a_terminal() -> type:
    """Return the library's progress bar, which shows nothing if stderr is no terminal, whatever
    another library has enabled."""

    class TerminalBar(_library().utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, disable: bool | None = None, **options: Any) -> None:
            super().__init__(*args, disable=disable, **options)  # None: tqdm looks at the stream

    return TerminalBar


@contextlib.contextmanager
def _errors_at(address: Address) -> Iterator[None]:
    """Raise errors of the library, which are of many types, as HubError of one line."""
    try:
        yield
    except Exception as error:
        raise HubError(f"{address}: {_reason(error, address)}") from None


def _reason(error: Exception, address: Address) -> str:
    """Say why a repository cannot be read, and what helps."""
    hub = _library()
    errors, site = hub.errors, hub.constants.ENDPOINT.rpartition("@")[2]
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    token = "log in to an account that may read it (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"gated: accept its terms at the hub, and {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {address.revision!r}: give a branch, a tag or a whole commit"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"there is no such {address.kind}, or it is private: correct the name, or {token}"
    if status is not None:
        return f"the hub answers {status}: try again later, or {token}"
    if hub.constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and it is not (all) in {cache_folder()}: unset it, or give "
            "the same command first where the hub is reachable"
        )
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return f"no space is left in {cache_folder()}: free some, or set HF_HOME to another disk"
    if isinstance(error, errors.HFValidationError):
        return "no name that a hub may have: give ORG/NAME"
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    text = text.replace(hub.get_token() or "\0", "HF_TOKEN").replace(hub.constants.ENDPOINT, site)
    return (
        f"the download from {site} failed ({text or type(error).__name__}): give the same command "
        "again, which goes on with the files that are missing"
    )
