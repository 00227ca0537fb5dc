"""Pages of HTML that are one file each: a template within the frame that all pages share
(`page.html`, `page.css`, `page.js`), filled in.

A template has places such as `{{title}}`. The frame's policy (`Content-Security-Policy`) lets a
browser load nothing from elsewhere."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from lather import __version__
from lather.files import read_text


def write_page(aside: Path, template: tuple[str, str], data: Any, **texts: str) -> None:
    """Write the page that a template, as package and file name, makes of plain values and texts, in
    which HTML means nothing."""
    own = files("lather")
    filled = {
        **{name: html.escape(text) for name, text in {"version": __version__, **texts}.items()},
        "style": read_text(own.joinpath("page.css")),
        "script": read_text(own.joinpath("page.js")),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    body = read_text(files(template[0]).joinpath(template[1]))
    page = read_text(own.joinpath("page.html")).replace("{{body}}", body)
    aside.write_text(
        re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], page), "utf-8", errors="replace"
    )
