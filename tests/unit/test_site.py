"""The site fetches nothing from elsewhere, and links between files of the repository lead to its pages."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs" / "mkdocs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://cdn.example.org/a.js">',
        '<link rel="stylesheet" href="//fonts.example.org/css">',
        '<img alt="" src="http://example.org/badge.svg">',
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_seen(hooks, tag):
    assert hooks.fetched(f"<p>{tag}</p>") == [tag]


def test_links_and_files_of_the_site_itself_are_not_fetched_from_elsewhere(hooks):
    own = '<a href="https://arxiv.org/abs/1910.02054">ZeRO</a><script src="assets/a.js"></script><link href="a.css">'
    assert hooks.fetched(own) == []


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("plan.md", "../results/search.json", "repository/results/search.json"),
        ("axes/shard.md", "../traffic.md#weights", "../traffic.md#weights"),
        ("repository/README.md", "docs/plan.md", "../plan.md"),
        ("README.md", "../results/", "repository/results/index.md"),
        ("plan.md", "https://arxiv.org/abs/1910.02054", "https://arxiv.org/abs/1910.02054"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hooks, page, link, moved):
    assert hooks.moved(page, link) == moved
