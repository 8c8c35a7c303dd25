"""The upstream manifests are in order, and a subtree is compared with its upstream by path and public name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.subtree import api, compare, manifest

MINIMAL = 'name = "up"\nurl = "u"\nlicence = "MIT"\nsubtree = "ours"\nupstream_root = "pkg"\ntag = "v1"\n'


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_manifest_is_valid_and_its_mirrored_modules_are_here() -> None:
    manifests = manifest.load_all()
    names = {"verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm", "slime"}
    assert {item.name for item in manifests} == names
    assert [(item.name, module) for item in manifests for module in compare.status(item)[1]] == []


def test_a_wrong_manifest_is_named_with_every_fault(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'name = "a"\ncolour = "red"\n')
    write(tmp_path / "b.toml", "name =\n")
    with pytest.raises(
        ValueError, match=r"(?s)a\.toml: missing key 'url'.*unknown key 'colour'.*neither 'tag'.*b\.toml"
    ):
        manifest.load_all(tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no upstream is called 'vlm'.*vllm_ascend"):
        manifest.load("vlm")


def test_public_api_reads_signatures_without_importing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.py",
        "import nothing_that_exists\nLIMIT: int = 3\n_hidden = 1\n"
        "def f(a, b=1, *, c, d=2, **rest): ...\ndef _g(): ...\n"
        "class C:\n    x: int\n    y: int = 0\n    def __init__(self): ...\n    def run(self, *args): ...\n"
        "    def _no(self): ...\n",
    )
    assert api.public_api(path) == {
        "LIMIT": "value",
        "f": "(a, b=, *, c, d=, **rest)",
        "C": "class(x, y)",
        "C.__init__": "(self)",
        "C.run": "(self, *args)",
    }


def test_diff_tells_same_differing_missing_and_own(tmp_path: Path) -> None:
    root, upstream = tmp_path / "repo", tmp_path / "checkout"
    write(root / "ours/core/a.py", "def same(x): ...\ndef changed(x, y): ...\ndef mine(): ...\n")
    write(root / "ours/extra.py", "")
    write(upstream / "pkg/core/a.py", "def same(x): ...\ndef changed(x): ...\ndef theirs(): ...\n")
    write(upstream / "pkg/b.py", "")
    item = manifest.load("up", write(tmp_path / "m/up.toml", MINIMAL).parent)
    found = compare.diff(item, upstream, root)
    assert (found.missing, found.ours_only) == (("b.py",), ("extra.py",))
    (module,) = found.shared
    assert module.same == ("same",)
    assert module.differs == (("changed", "(x, y)", "(x)"),)
    assert (module.missing, module.ours_only) == (("theirs",), ("mine",))


def test_diff_against_something_else_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a checkout of .* at v0.9.1"):
        compare.diff(manifest.load("vllm"), tmp_path)
    with pytest.raises(ValueError, match="only facts"):
        compare.diff(manifest.load("slime"), tmp_path)
