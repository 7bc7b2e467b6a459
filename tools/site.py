"""Hooks of `mkdocs.yml`: README.md is the site's first page, and files outside docs/ that pages link to come along.

On the repository's page README.md links to docs/PAGE.md, and pages link to ../FILE. On the site all of them are in one
folder, so that both forms lose their folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
#: Pages outside docs/ -> their places on the site.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()((?:\.\./|docs/)?)([^)\s#]*)(#[^)\s]*)?\)")


def _sources() -> list[Path]:
    """Return all pages of the site."""
    return [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and every other file there that a page links to."""
    linked = {name for path in _sources() for _, _, name, _ in _LINK.findall(path.read_text(encoding="utf-8")) if name}
    named = {name for name in linked if (ROOT / name).is_file() and not name.endswith(".md")}
    for name in sorted({*OUTSIDE, *named}):
        files.append(File.generated(config, OUTSIDE.get(name, name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Make links of the repository's folders links of the site's one folder."""

    def on_site(link: re.Match[str]) -> str:
        start, _, name, anchor = link.groups()
        return f"{start}{OUTSIDE.get(name, name)}{anchor or ''})"

    return _LINK.sub(on_site, markdown)
