"""Every function, file and link that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import ROOT, functions_of, missing_references

FOLDERS = (
    "README.md", "README.zh.md", "CONTRIBUTING.md", "docs", "recipes", "verl", "vllm", "vllm_ascend", "megatron",
    "mindspeed", "mindspeed_llm", "hf_formats", "third_party", "tools", "tests",
)  # fmt: skip
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in ([ROOT / folder] if folder.endswith(".md") else (ROOT / folder).rglob("*.md"))
    if "outputs" not in page.parts
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_functions_that_a_page_names_are_there(page: Path) -> None:
    assert missing_references(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def _source_of(path: str, name: str) -> str:
    """Return the source of a function, or of a file, with adjacent string literals joined."""
    source = functions_of(path)[name] if name else (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r'"\s*f?"', "", source)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_messages_are_those_of_the_code(page: Path) -> None:
    """A page that quotes what a function prints (``- prints `...` (`file.py:function`)``) quotes it correctly."""
    text = page.read_text(encoding="utf-8")
    messages = re.findall(r"^- prints `([^`]+)` \(`([\w/.-]+\.py)(?::([\w.]+))?`\)", text, flags=re.MULTILINE)
    for message, path, name in messages:
        source = _source_of(path, name)
        parts = [part for part in message.split("...") if part]
        assert parts and all(part in source for part in parts), f"{path}:{name} does not print {message}"
