"""Hooks of mkdocs: the site also has CONTRIBUTING.md and examples/README.md, whose links lead to pages of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

# The files outside of `docs/` that are pages of the site, with the names of the pages.
PAGES = {"CONTRIBUTING.md": "contributing.md", "examples/README.md": "examples.md"}

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


# A text in brackets whose link was replaced with the path of a file.
PLAIN = re.compile(r"\[([^\]]*)\] \((`[^`]*`)\)")


def drop_brackets(match: re.Match) -> str:
    """Return the text without brackets, followed by the path of its file unless the text is the end of the path."""
    text, path = match[1], match[2]
    return path if path.strip("`").endswith(text.strip("`")) else f"{text} ({path})"


def rewrite_links(text: str, folder: Path, docs: Path = ROOT / "docs") -> str:
    """Return a page with relative links that lead to pages of the site.

    A link to a file that is not a page, such as a script, becomes the path of the file as plain text.

    Args:
        text: The page in Markdown.
        folder: The folder that its links are relative to.
        docs: The folder of the site's pages.
    """

    def replace(match: re.Match) -> str:
        target, anchor = (folder / match[1]).resolve(), match[2] or ""
        if not match[1] or target.is_relative_to(docs):
            page = target.relative_to(docs).as_posix() if match[1] else ""
            return f"]({page}{anchor})"
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        return f"] (`{path}`)"

    return PLAIN.sub(drop_brackets, LINK.sub(replace, text))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of `docs/`."""
    for source, page in PAGES.items():
        path = ROOT / source
        content = rewrite_links(path.read_text(encoding="utf-8"), path.parent)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that lead out of `docs/`."""
    if page.file.src_uri in PAGES.values() or "](../" not in markdown:
        return markdown
    folder = Path(page.file.abs_src_path).parent
    return rewrite_links(markdown, folder)
