"""The upstream manifests are in order, and a subtree is compared with its upstream by path and public name."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import tarfile
import zipfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_llm import convert_ckpt_deepseek3, convert_ckpt_deepseek3_mcore2hf
from tests.tools.subtree_repos import ROOT, commit, export, git, repository, state, tool, upstream, write
from tools import marks
from tools.subtree import api, compare, manifest, snapshot
from tools.workshop import adaptations
from verl.trainer.config.declared import other_names
from verl.trainer.config.fixed_keys import FIXED_KEYS
from verl.workers.config import McoreEngineConfig, overrides

MINIMAL = 'name = "up"\nurl = "u"\nlicence = "MIT"\nsubtree = "ours"\nupstream_root = "pkg"\ntag = "v1"\n'


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
        "C.__init__": "()",
        "C.run": "(*args)",
    }
    with pytest.raises(ValueError, match=r"n\.py:1: not Python.*conflict markers"):
        api.public_api(write(tmp_path / "n.py", "<<<<<<< ours\n"))


def test_diff_tells_same_differing_missing_and_own(tmp_path: Path) -> None:
    root, upstream = tmp_path / "repo", tmp_path / "checkout"
    write(root / "ours/core/a.py", "def same(x): ...\ndef changed(x, y): ...\ndef mine(): ...\n")
    write(root / "ours/extra.py", "")
    write(upstream / "core/a.py", "def same(x): ...\ndef changed(x): ...\ndef theirs(): ...\n")
    write(upstream / "b.py", "")
    item = manifest.load("up", write(tmp_path / "m/up.toml", MINIMAL).parent)
    found = compare.diff(item, upstream, root)
    assert (found.missing, found.ours_only) == (("b.py",), ("extra.py",))
    (module,) = found.shared
    assert module.same == ("same",)
    assert module.differs == (("changed", "(x, y)", "(x)"),)
    assert (module.missing, module.ours_only) == (("theirs",), ("mine",))
    assert found.counts() == (1, 1, 1, 1)
    with pytest.raises(ValueError, match="only facts"):
        compare.diff(manifest.load("slime"), tmp_path)


def test_a_new_pin_leaves_every_other_line(tmp_path: Path) -> None:
    text = MINIMAL.replace("url", "# a comment\nurl") + 'commit = "abc"\nmirrored = [\n  "tag.py",\n]\n'
    changed = manifest.with_pin(text, "v2", "def")
    item = manifest.parse(changed, "up.toml")
    assert (item.tag, item.commit, item.mirrored) == ("v2", "def", ("tag.py",))
    assert [line for line in text.splitlines() if line not in changed.splitlines()] == ['tag = "v1"', 'commit = "abc"']
    with pytest.raises(ValueError, match="no quote"):
        manifest.with_pin(text, 'v"2', "")


def test_every_upstream_with_a_folder_has_a_recorded_api_of_the_pinned_version_and_in_order() -> None:
    for item in manifest.load_all():
        recorded = snapshot.load(item.name)
        if not item.subtree:
            continue
        assert recorded is not None and recorded.pin == item.version
        assert snapshot.parse(snapshot.render(item.name, recorded), item.name) == recorded
        modules = [module for module in recorded.modules if module != snapshot.OPTIONS]
        assert item.mirrors(modules) == modules, "an API of a module that is not mirrored"
        assert set(item.options) <= recorded.modules.get(snapshot.OPTIONS, {}).keys()
        same, *_ = snapshot.compare(item, recorded).counts()
        assert same > 0


def test_every_mirrored_option_is_a_key_or_a_flag_here() -> None:
    engine = "actor_rollout_ref.actor.megatron"
    fields = {field.name for field in dataclasses.fields(McoreEngineConfig)}
    keys = overrides.TRANSFORMER_OVERRIDES.keys() | {key.rpartition(".")[2] for key in (*FIXED_KEYS, *other_names())}
    converters = (convert_ckpt_deepseek3, convert_ckpt_deepseek3_mcore2hf)
    flags = "".join(tool_help(converter) for converter in converters)
    for item in (manifest.load("mindspeed"), manifest.load("mindspeed_llm")):
        for option in item.options:
            is_there = f"{option} " in flags if option.startswith("--") else option in fields | keys
            assert is_there, f"{item.name}: {option} is neither in {engine} nor a flag"


def tool_help(module: ModuleType) -> str:
    shown = StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        module.main(["--help"])
    return shown.getvalue().replace("\n", " \n").replace("]", " ]")


def test_status_and_adaptations_agree_with_the_marks_in_the_sources() -> None:
    marked = subprocess.run(
        ["git", "grep", "--untracked", "-hoE", r"^\s*# " + marks.WORD + r"\([a-z0-9-]+\)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    ids = sorted(line.split("(")[1].rstrip(")") for line in marked.stdout.splitlines())
    assert ids == sorted(mark.id for mark in marks.collect(ROOT)[0])
    listed = (ROOT / adaptations.OUTPUT).read_text(encoding="utf-8")
    assert ids == sorted(re.findall(r"^\| `([a-z0-9-]+)` \|", listed, re.MULTILINE))
    shown = tool(ROOT, "status") + tool(ROOT, "adaptations", "--check")
    assert all(name in shown for name in [*ids, "core_v0.12.1", "v0.9.0", "modules of v0.6.1"])


def test_the_kinds_of_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    up = repository(tmp_path / "up")
    write(up / "pkg/a.py", "def f(x): ...\n")
    commit(up, "one", "v1")
    write(up / "pkg/a.py", "def f(x, y): ...\n")
    newest = commit(up, "two", "v2")
    root = tmp_path / "repo"
    write(root / "ours/a.py", "def f(x): ...\n")
    write(root / "third_party/up.toml", MINIMAL.replace('"u"', f'"file://{up}"') + 'mirrored = ["a.py"]\n')
    with zipfile.ZipFile(tmp_path / "pkg-2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pkg/a.py", "def f(x): ...\n")
        wheel.writestr("pkg-2.dist-info/METADATA", "Name: pkg\nVersion: 2\n")
    with tarfile.open(tmp_path / "pkg-2.tar.gz", "w:gz") as sdist:
        sdist.add(up / "pkg", "pkg-2/pkg")
    write(tmp_path / "site/pkg/a.py", "def f(x): ...\n")
    write(tmp_path / "site/the_pkg-3.dist-info/METADATA", "Metadata-Version: 2.1\nName: the-pkg\nVersion: 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    same = {
        "given": f"file://{up}",
        "clone": str(up),
        "wheel": str(tmp_path / "pkg-2-py3-none-any.whl"),
        "package": "the-pkg",
    }
    assert "v1" in tool(root, "diff", "up")
    for spec in same.values():
        assert "differs\n" not in tool(root, "diff", "up", "--names", "--upstream", spec), spec
    for spec in (str(up / "pkg" / ".."), str(tmp_path / "pkg-2.tar.gz")):
        shown = tool(root, "diff", "up", "--names", "--text", "--tag", "v2", "--upstream", spec)
        assert "a.py: f differs" in shown and "-def f(x, y): ..." in shown and "+def f(x): ..." in shown, spec
    assert newest[:12] in tool(root, "diff", "up", "--tag", newest[:9])
    assert "no 'v9': its newest tags are v2, v1" in tool(
        root, "diff", "up", "--tag", "v9", "--upstream", str(up), code=1
    )
    assert "no folder 'pkg'" in tool(root, "diff", "up", "--upstream", str(tmp_path / "cache"), code=1)
    assert "is no git url, folder, archive" in tool(root, "diff", "up", "--upstream", "no-such-package", code=1)
    assert "wheel or sdist" in tool(root, "diff", "up", "--upstream", f"file://{tmp_path}/nothing", code=1)


def test_no_file_of_an_archive_lands_outside_of_it(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    write(root / "third_party/up.toml", MINIMAL + 'mirrored = ["a.py"]\n')
    write(tmp_path / "a.py", "def f(x): ...\n")
    for name in ("pkg-2/pkg/../../../a.py", "/tmp/a.py"):
        member = tarfile.TarInfo(name)
        with tarfile.open(tmp_path / "pkg-2.tar.gz", "w:gz") as sdist:
            sdist.addfile(member)
        shown = tool(root, "diff", "up", "--upstream", str(tmp_path / "pkg-2.tar.gz"), code=1)
        assert f"{name!r}, which lies outside" in shown


def test_import_records_the_api_and_rebase_of_our_own_code_only_reports(tmp_path: Path) -> None:
    up = upstream(tmp_path / "up")
    root = repository(tmp_path / "repo")
    write(root / "pkg/helpers.py", "def kept(x): ...\n")
    text = MINIMAL.replace('"ours"', '"pkg"') + 'mirrored = ["helpers.py", "old_name.py", "gone.py"]\n'
    write(root / "third_party/up.toml", text)
    commit(root, "ours")
    tool(root, "import", "up", "--upstream", str(up))
    recorded = snapshot.load("up", root)
    assert recorded is not None and recorded.pin == "v1"
    assert recorded.modules["helpers.py"] == {"kept": "(x)", "used_by_us": "(x)", "unused": "()"}
    before = state(root)
    shown = tool(root, "rebase", "up", "--tag", "v1.4", "--upstream", str(up), "--text")
    for line in (
        "- [ ] `old_name.py` is `new_name.py` now; not here; correct `mirrored` in third_party/up.toml",
        "- [ ] `gone.py` is gone; not here; correct `mirrored` in third_party/up.toml",
        "- [x] `helpers.py`: `used_by_us`; not here",
        "- [ ] `helpers.py`: `kept` `(x)` -> `(x, scale=)`; ours: pkg/helpers.py `(x)`",
        "4 changes: 3 to do, 1 that need nothing.",
        "+moved_3 = 333",
        "our own code",
    ):
        assert line in shown, line
    assert state(root) == before
    shown = tool(root, "rebase", "up", "--tag", "v1.4", "--upstream", str(export(up, "v1.4", tmp_path / "plain")))
    assert "- [x] `helpers.py`: `used_by_us`" in shown and "neither texts nor keys are compared" in shown
    shown = tool(root, "rebase", "up", "--tag", "v7", "--upstream", str(up), code=1)
    assert "has no 'v7': its newest tags are" in shown
    assert "has no old_name.py, gone.py: correct 'mirrored'" in tool(
        root, "import", "up", "--tag", "v1.4", "--upstream", str(up), code=1
    )
    write(root / "third_party/up.toml", text.replace("old_name", "new_name").replace(', "gone.py"', ""))
    tool(root, "import", "up", "--tag", "v1.4", "--upstream", str(up))
    item = manifest.load("up", root / "third_party")
    assert (item.tag, item.commit) == ("v1.4", git(up, "rev-parse", "v1.4"))


def test_a_rebase_fetches_both_versions_of_the_manifests_url_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    up, root = upstream(tmp_path / "up"), tmp_path / "repo"
    text = MINIMAL.replace('"u"', f'"file://{up}"') + 'mirrored = ["*.py"]\n'
    write(root / "third_party/up.toml", text)
    shown = tool(root, "rebase", "up", "--tag", "v1.1")
    assert "1 mirrored module(s) with another text" in shown and "- [" not in shown
    shutil.rmtree(up)
    assert "1 mirrored module(s) with another text" in tool(root, "rebase", "up", "--tag", "v1.1")
    assert "Nothing changes in what we mirror" in tool(root, "rebase", "up", "--tag", "v1")


def test_without_a_recorded_api_one_version_alone_is_refused(tmp_path: Path) -> None:
    root, up = tmp_path / "repo", tmp_path / "plain"
    write(root / "third_party/up.toml", MINIMAL + 'mirrored = ["a.py"]\n')
    write(up / "pkg/a.py", "def f(x): ...\n")
    shown = tool(root, "rebase", "up", "--tag", "v2", "--upstream", str(up), code=1)
    assert "record the pinned one first" in shown
