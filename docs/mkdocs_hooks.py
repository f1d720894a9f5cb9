"""What MkDocs needs beside mkdocs.yml: folders in its navigation, files outside docs/, and no word to the net."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"  # where the site keeps what pages link to and docs/ does not have
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")

log = get_plugin_logger(__name__)  # a warning ends a strict build


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder of the navigation by the pages in it."""
    config.nav = [_expand(entry) for entry in config.nav or []]


def _expand(entry: object) -> object:
    if isinstance(entry, str) and entry.endswith("/"):
        return sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / entry).glob("*.md"))
    if isinstance(entry, dict):
        return {title: _expand(inside) for title, inside in entry.items()}
    if isinstance(entry, list):
        return [_expand(each) for each in entry]
    return entry


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Bring along every file outside docs/ that a page links to, and what these pages link to in turn."""
    waiting = [ROOT / "docs" / page.src_uri for page in files.documentation_pages()]
    waiting += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen and path.exists():
            seen.add(path)
            waiting += _led_to(path)
            if not _is_inside(path):
                files.append(_brought(path, config))


def _led_to(path: Path) -> list[Path]:
    """Return the files of a folder, and those that a page links to."""
    if path.is_dir():
        return [each for each in path.iterdir() if each.is_file()]
    return [_path(path, target) for target in _targets(path.read_text())] if path.suffix == ".md" else []


def _brought(path: Path, config: MkDocsConfig) -> File:
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        listing = "\n".join(f"- [{name}]({name})" for name in names)
        return File.generated(config, _uri(path), content=f"# {path.relative_to(ROOT)}/\n\n{listing}\n")
    return File.generated(config, _uri(path), abs_src_path=str(path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: moved(page.file.src_uri, link[0]), prose) for prose in parts[::2]]
    return "".join(parts)


def moved(page: str, target: str) -> str:
    """Return a link of one of the site's pages as it is to be there."""
    if "://" in target or target.startswith("#"):
        return target
    path, _, anchor = target.partition("#")
    is_outside = page.startswith(f"{OUTSIDE}/")
    source = ROOT / (page.removeprefix(f"{OUTSIDE}/") if is_outside else f"docs/{page}")
    there = posixpath.relpath(_uri(_path(source, path)), posixpath.dirname(page) or ".")
    return f"{there}#{anchor}" if anchor else there


def _targets(markdown: str) -> list[str]:
    """Return what the prose of a page links to within the repository."""
    prose = "".join(FENCE.split(markdown)[::2])
    return [target.partition("#")[0] for target in LINK.findall(prose) if "://" not in target and target[0] != "#"]


def _path(source: Path, target: str) -> Path:
    return Path(posixpath.normpath((source.parent / target).as_posix()))


def _uri(path: Path) -> str:
    """Return the address that a file of the repository has as a source of the site."""
    if _is_inside(path):
        return path.relative_to(ROOT / "docs").as_posix()
    inside = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return f"{inside}/index.md" if path.is_dir() else inside


def _is_inside(path: Path) -> bool:
    return path.is_relative_to(ROOT / "docs")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Warn of whatever a reader's browser would fetch from elsewhere."""
    for address in fetched(output):
        log.warning(f"{page.file.src_uri} fetches {address}: keep a copy in docs/, or leave it out")


def fetched(html: str) -> list[str]:
    """Return the tags that load something from another host; links that a reader follows are not among them."""
    return [tag for tag in FETCHED.findall(html) if "canonical" not in tag]
