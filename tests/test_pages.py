"""Every function, file and link that the pages name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import REFERENCE, ROOT, functions_of, missing_references

PAGES = sorted([ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").glob("*.md")])


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


def _said(path: str, name: str) -> str:
    """The source of a function, or of a file, with the parts of its texts joined."""
    source = functions_of(path)[name] if name else (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r'"\s*f?"', "", source)


def test_messages_of_the_debugging_guide_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    messages = re.findall(r"^- prints `([^`]+)` \(`([\w/.-]+\.py)(?::([\w.]+))?`\)", text, flags=re.MULTILINE)
    assert len(messages) == text.count("\n- prints ") > 15
    for message, path, name in messages:
        said = _said(path, name)
        parts = [part for part in message.split("...") if part]
        assert parts and all(part in said for part in parts), f"{message} is not said by {path}:{name}"
