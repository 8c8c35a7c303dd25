"""Every function, file and link that the pages name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import REFERENCE, ROOT, missing_references

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_names_are_there(page: Path) -> None:
    assert missing_references(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_life_of_a_step_names_many_places() -> None:
    text = (ROOT / "docs" / "life_of_a_step.md").read_text(encoding="utf-8")
    assert len(REFERENCE.findall(text)) > 50
