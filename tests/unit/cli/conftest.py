"""Answers of the planner's search, kept: tests ask one question to be told, to read JSON, and to look at a detail.

That the same question has the same answer is shown where search is tested by itself.
"""

import pytest

from meshwright.search import best_first
from meshwright.search.best_first import SearchResult
from meshwright.search.question import Question

SEARCH = best_first._search
ANSWERS: dict[tuple[str, int, bool], SearchResult] = {}  # by all that a question says


def remembered(question: Question, top: int, kinds: bool) -> SearchResult:
    asked = (repr(question), top, kinds)
    if asked not in ANSWERS:
        ANSWERS[asked] = SEARCH(question, top, kinds)
    return ANSWERS[asked]


@pytest.fixture(autouse=True)
def a_question_is_searched_for_once(monkeypatch):
    monkeypatch.setattr(best_first, "_search", remembered)
