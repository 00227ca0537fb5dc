"""Pages of HTML, each a single file: a template in the frame that all pages share (`page.html`,
`page.css`, `page.js`).

Values replace names in the template, `{{title}}` for example. The frame's policy
(`Content-Security-Policy`) lets a browser load nothing from elsewhere."""

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
    """Write a page. `template`: package and file name; `data`: plain values, for its script;
    `texts`: by name, in which HTML means nothing."""
    frame = files("lather")
    filled = {
        **{name: html.escape(text) for name, text in {"version": __version__, **texts}.items()},
        "style": read_text(frame.joinpath("page.css")),
        "script": read_text(frame.joinpath("page.js")),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    body = read_text(files(template[0]).joinpath(template[1]))
    page = read_text(frame.joinpath("page.html")).replace("{{body}}", body)
    aside.write_text(
        re.sub(r"\{\{(\w+)\}\}", lambda name: filled[name[1]], page), "utf-8", errors="replace"
    )
