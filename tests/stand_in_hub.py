"""A hub on 127.0.0.1 that speaks the protocol of huggingface.co, for the real `huggingface_hub`:
lists of repositories and trees, files by revision with ETag and X-Repo-Commit, large files behind a
redirect to another host, ranges, refusals with their X-Error-Code, and connections that break."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

TOKEN = "hf_TheTokenOfThisTest"
LARGE = 1000
"""Files of this size in bytes are stored apart, as with Git LFS."""
API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Stored:
    """A repository: the files of each commit, the commits of branches, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files to a branch; return its name."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name], self.refs[branch] = files, name
        return name


@dataclass
class Hub:
    """The state of the stand-in."""

    url: str = ""
    repositories: dict[tuple[str, str], Stored] = field(default_factory=dict)
    """By kind and name."""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    """For each file name: after how many bytes the next connections break."""
    requests: list[tuple[str, str, str, bool]] = field(default_factory=list)
    """Method, path, range, and whether the request had a token."""

    def add(self, kind: str, name: str, files: dict[str, bytes], **options: bool) -> Stored:
        stored = self.repositories[kind, name] = Stored(**options)
        stored.commit(files)
        return stored

    def downloads(self) -> list[str]:
        """Return the names of the files whose contents were asked for, in order of names."""
        paths = [path for method, path, _, _ in self.requests if method == "GET"]
        names = [path.partition("/resolve/")[2].partition("/")[2] for path in paths]
        return sorted({*filter(None, names), *(p[5:] for p in paths if p.startswith("/cdn/"))})


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, for a commit."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a stand-in on a free port."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def stand_in_hub(home: Path) -> Iterator[Hub]:
    """Run a stand-in, and let `huggingface_hub` of this process use it, with `home` as HF_HOME,
    without a token, in short pieces."""
    constants: Any = huggingface_hub.constants
    with serve() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        patch.delenv("HF_TOKEN", raising=False)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url, token = urlsplit(self.path), self.headers.get("Authorization", "")
        path, is_known = unquote(url.path), token == f"Bearer {TOKEN}"
        self.hub.requests.append((self.command, path, self.headers.get("Range", ""), bool(token)))
        if path.startswith("/cdn/"):
            (digest,) = parse_qs(url.query)["digest"]
            self._send(self._blob(digest), name=path[5:])
            return
        api, resolve = API.fullmatch(url.path), RESOLVE.fullmatch(url.path)
        kind, name, what, revision = "", "", "resolve", ""
        if api:
            kind, name, what, revision = api.groups(default="")
        elif resolve:
            kind, name = "dataset" if resolve[1] else "model", resolve[2]
            revision = resolve[3]
        stored = self.hub.repositories.get((kind, name))
        revision = unquote(revision or "main")
        if stored is None or (stored.is_private and not is_known):
            code = "RepoNotFound" if token else ""
            self._refuse(404 if token else 401, code, "Repository not found")
        elif (commit := stored.refs.get(revision, revision)) not in stored.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif resolve is None:
            self._list(what, name, commit, stored.commits[commit])
        elif stored.is_gated and not is_known:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to {name} is gated")
        else:
            self._file(unquote(resolve[4]), commit, stored.commits[commit])

    def _list(self, what: str, name: str, commit: str, files: dict[str, bytes]) -> None:
        if what == "tree":
            self._json([_entry(path, content) for path, content in files.items()])
        else:
            self._json({"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in files]})

    def _file(self, name: str, commit: str, files: dict[str, bytes]) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found", commit)
        elif len(files[name]) < LARGE:
            self._send(files[name], name=name, commit=commit, etag=_sha1(files[name]))
        else:
            digest = hashlib.sha256(files[name]).hexdigest()
            place = self.hub.url.replace("127.0.0.1", "localhost")
            self.send_response(302)
            self.send_header("Location", f"{place}/cdn/{name}?digest={digest}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Etag", f'"{digest}"')
            self.send_header("X-Linked-Size", str(len(files[name])))
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _blob(self, digest: str) -> bytes:
        return next(
            content
            for stored in self.hub.repositories.values()
            for files in stored.commits.values()
            for content in files.values()
            if hashlib.sha256(content).hexdigest() == digest
        )

    def _send(self, content: bytes, *, name: str, commit: str = "", etag: str = "") -> None:
        start = int(re.findall(r"\d+", self.headers.get("Range", "bytes=0-"))[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag or hashlib.sha256(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks := self.hub.breaks.get(name):
            self.wfile.write(content[start : start + breaks.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), name="")

    def _refuse(self, status: int, code: str, message: str, commit: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "oid": _sha1(content),
        "size": len(content),
        "path": path,
    }
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry
