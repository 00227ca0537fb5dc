"""Hooks of mkdocs: links out of docs/ lead to copies on the site, and no page loads anything from
another host.

The pages are read in two ways, as files of the repository and as a site. Their links are those of
the repository. On the site, files outside of docs/ that a page links to lie under repository/:
pages as pages, source files as pages that show them, folders as lists, all else as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
ELSEWHERE = "repository/"
LANGUAGES = {".py": "python", ".toml": "toml"}
"""The languages of source files that are shown as pages."""

FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
)
LINKED = re.compile(r"<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>")


def targets(text: str, path: str) -> Iterator[str]:
    """Yield the files of the repository that the text of the page `path` links to."""
    for part in FENCED.split(text)[::2]:
        for _, link in LINK.findall(part):
            if "://" not in link:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def place_of(path: str) -> str:
    """Say where a file of the repository is on the site, as mkdocs calls its source."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if (REPOSITORY / path).is_dir():
        return f"{ELSEWHERE}{path}/index.md"
    return f"{ELSEWHERE}{path}.md" if Path(path).suffix in LANGUAGES else f"{ELSEWHERE}{path}"


def path_of(place: str) -> str:
    """Name the file of the repository that the page `place` is made from."""
    return place.removeprefix(ELSEWHERE) if place.startswith(ELSEWHERE) else f"docs/{place}"


def with_links_of_the_site(text: str, place: str) -> str:
    """Return the text of the page `place` with every link as the site needs it."""

    def link_of_the_site(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path_of(place)), match[2]))
        return match[1] + posixpath.relpath(place_of(target), posixpath.dirname(place) or ".")

    parts = FENCED.split(text)
    parts[::2] = [LINK.sub(link_of_the_site, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, and the files that those link to."""
    pages = [file for file in files if file.src_uri.endswith(".md")]
    waiting = [
        path for page in pages for path in targets(page.content_string, f"docs/{page.src_uri}")
    ]
    while waiting:
        path = waiting.pop()
        place = place_of(path)
        if (
            not place.startswith(ELSEWHERE)
            or files.get_file_from_path(place)
            or not (REPOSITORY / path).exists()
        ):
            continue  # mkdocs itself complains about a file that does not exist
        text = _text(path)
        if text is None:
            file = File.generated(config, place, abs_src_path=str(REPOSITORY / path))
        else:
            file = File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
            waiting += targets(text, path_of(place))
        files.append(file)
    return files


def _text(path: str) -> str | None:
    """Return the Markdown that shows a file or folder of the repository, or None if it is copied as
    it is."""
    file = REPOSITORY / path
    unsearched = "---\nsearch: {exclude: true}\n---\n"
    if file.is_dir():
        inside = sorted(
            one.relative_to(file).as_posix()
            for one in file.rglob("*")
            if one.is_file() and "__pycache__" not in one.parts
        )
        return f"{unsearched}# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in inside)
    if language := LANGUAGES.get(file.suffix):
        return f"{unsearched}# {path}\n\n````{language}\n{file.read_text('utf-8')}````\n"
    return file.read_text("utf-8") if file.suffix == ".md" else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return with_links_of_the_site(markdown, page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := LOADED.search(output) or LINKED.search(output):
        raise PluginError(
            f"{page.file.src_uri}: {found[0]} loads from another host: have a copy on the site"
        )
    return output
