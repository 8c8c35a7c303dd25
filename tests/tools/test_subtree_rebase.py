"""A planted upstream history: each kind of change ends as it should, and nothing of ours is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.tools.subtree_repos import LICENCE, MARK, commit, fork, git, repository, state, tool, upstream, write
from tools.subtree import guards, manifest, snapshot

INNER = '"inner" = { test = "tests/test_it.py::test_it", env = "main" }\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("repos")
    fork(base / "ours", upstream(base / "up"))
    return base


@pytest.fixture
def repos(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(ours, the upstream), fresh copies."""
    shutil.copytree(made, tmp_path / "r")
    git(tmp_path / "r/ours", "update-index", "-q", "--refresh")  # the copies are other files to git
    return tmp_path / "r/ours", tmp_path / "r/up"


def rebase(repos: tuple[Path, Path], tag: str, *words: str, code: int = 0) -> str:
    return tool(repos[0], "rebase", "pkg", "--tag", tag, "--upstream", str(repos[1]), *words, code=code)


def block(root: Path, name: str) -> bool:
    """Whether our marked block is whole in a file."""
    text = (root / "pkg" / name).read_text(encoding="utf-8")
    return MARK in text and text.index(MARK) < text.index("'ours'\n") < text.index(f"{MARK} END")


def test_import_takes_the_files_as_one_merge_with_trailers(repos: tuple[Path, Path]) -> None:
    root, up = repos
    taken = git(root, "rev-parse", "HEAD~1")
    assert len(git(root, "rev-list", "--parents", "-1", taken).split()) == 3
    message = git(root, "log", "-1", "--format=%B", f"{taken}^2")
    split = git(up, "subtree", "split", "-q", "--prefix=pkg", "v1")
    assert f"git-subtree-dir: pkg\ngit-subtree-split: {split}" in message
    assert git(root, "rev-parse", f"{taken}:pkg") == git(up, "rev-parse", "v1:pkg")
    assert (root / "third_party/licences/pkg/LICENSE").read_text(encoding="utf-8") == "do as you like\n"
    item = manifest.load("pkg", root / "third_party")
    assert (item.tag, item.commit) == ("v1", git(up, "rev-parse", "v1"))
    assert f"upstream's files of {split[:9]}" in tool(root, "status")
    words = ("--files", "--tag", "v1", "--upstream", str(up))
    assert "is there already" in tool(root, "import", "pkg", *words, code=1)
    assert "also give --licence" in tool(root, "import", "other", *words, code=1)


def test_a_clean_change_is_one_commit_that_keeps_our_block(repos: tuple[Path, Path]) -> None:
    root, _ = repos
    head = git(root, "rev-parse", "HEAD")
    assert "Done: commit" in rebase(repos, "v1.1")
    assert git(root, "rev-parse", "HEAD^1") == head and git(root, "status", "--porcelain") == ""
    text = (root / "pkg/clean.py").read_text(encoding="utf-8")
    assert "line_2 = 222\n" in text and "line_29 = 2929\n" in text and block(root, "clean.py")
    assert manifest.load("pkg", root / "third_party").tag == "v1.1"
    recorded = snapshot.load("pkg", root)
    assert recorded is not None and recorded.pin == "v1.1"
    assert "holds v1.1 already" in rebase(repos, "v1.1")
    assert "in order" in tool(root, "adaptations", "--check")
    assert not (root / ".git/subtree-stage").exists()


def test_the_manifests_url_is_fetched_into_the_cache(
    repos: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, up = repos
    url = write(root / "third_party/pkg.toml", (root / "third_party/pkg.toml").read_text(encoding="utf-8"))
    text = "\n".join(
        f'url = "file://{up}"' if line.startswith("url") else line for line in url.read_text().splitlines()
    )
    write(url, text + "\n")
    commit(root, "another url")
    assert "v1.1" in tool(root, "diff", "pkg", "--tag", "v1.1")  # one tag, without history
    assert "Done" in tool(root, "rebase", "pkg", "--tag", "v1.1")  # the same cache, with all of it
    assert "nothing changes" in tool(root, "rebase", "pkg", "--tag", "v1.1", "--dry-run")


def test_a_conflict_is_staged_with_markers_and_both_ways_out_work(repos: tuple[Path, Path]) -> None:
    root, _ = repos
    before = state(root)
    dry = rebase(repos, "v1.2", "--dry-run", code=3)
    assert "CONFLICT (contents) pkg/both.py" in dry and "1 thing(s) to settle" in dry and state(root) == before
    shown = rebase(repos, "v1.2", code=3)
    assert "CONFLICT (contents) pkg/both.py" in shown and "Next:" in shown and "git merge --abort" in shown
    text = (root / "pkg/both.py").read_text(encoding="utf-8")
    assert "<<<<<<< ours\n" in text and ">>>>>>> pkg v1.2\n" in text
    assert block(root, "both.py") and "line_15 = 1515\n" in text and block(root, "clean.py")
    assert git(root, "rev-parse", "HEAD") == before[0]
    assert git(root, "diff", "--name-only", "--diff-filter=U") == "pkg/both.py"
    assert "a merge is in progress" in rebase(repos, "v1.1", code=1)
    assert "line_2 = 222\n" in (root / "pkg/clean.py").read_text(encoding="utf-8")
    git(root, "merge", "--abort")
    assert state(root) == before
    rebase(repos, "v1.2", code=3)
    settled = text.replace("<<<<<<< ours\n", "").split("=======\n")[0] + text.split(">>>>>>> pkg v1.2\n")[1]
    (root / "pkg/both.py").write_text(settled, encoding="utf-8")
    git(root, "add", "pkg/both.py")
    git(root, "commit", "--quiet", "--no-edit")
    assert git(root, "log", "-1", "--format=%s") == "Rebase pkg onto v1.2"
    assert manifest.load("pkg", root / "third_party").tag == "v1.2" and block(root, "both.py")
    assert "holds v1.2 already" in rebase(repos, "v1.2")


def test_a_rename_a_new_file_and_a_deletion_are_followed(repos: tuple[Path, Path]) -> None:
    root, _ = repos
    shown = rebase(repos, "v1.3")
    assert "renamed   old_name.py -> new_name.py" in shown and "new       brand_new.py" in shown
    assert "deleted   gone_untouched.py" in shown
    assert not (root / "pkg/old_name.py").exists() and not (root / "pkg/gone_untouched.py").exists()
    text = (root / "pkg/new_name.py").read_text(encoding="utf-8")
    assert "moved_3 = 333\n" in text and block(root, "new_name.py")
    assert (root / "pkg/brand_new.py").exists() and (root / "pkg/only_ours.py").exists()
    assert "`pkg/new_name.py`" in (root / "third_party/ADAPTATIONS.md").read_text(encoding="utf-8")


def test_a_deleted_function_that_we_call_waits_for_a_person(repos: tuple[Path, Path]) -> None:
    root, _ = repos
    head = git(root, "rev-parse", "HEAD")
    shown = rebase(repos, "v1.4", code=3)
    assert "deleted   helpers.py: used_by_us" in shown
    assert "changed   helpers.py: kept" in shown and "to   (x, scale=)" in shown
    assert "LOOK AT caller.py:1: uses 'used_by_us' of pkg.helpers, which is gone" in shown
    assert "LOOK AT caller.py:4: uses 'used_by_us' of pkg.helpers" in shown
    assert git(root, "rev-parse", "HEAD") == head and (root / ".git/MERGE_HEAD").exists()
    write(root / "caller.py", "print(2)\n")
    git(root, "add", "caller.py")
    git(root, "commit", "--quiet", "--no-edit")
    assert "used_by_us" not in (root / "pkg/helpers.py").read_text(encoding="utf-8")


def test_what_we_changed_and_they_deleted_is_a_conflict_never_lost(repos: tuple[Path, Path]) -> None:
    root, _ = repos
    shown = rebase(repos, "v1.5", code=3)
    assert "CONFLICT (contents) pkg/changed_by_us.py" in shown and "CONFLICT (modify/delete) pkg/gone.py" in shown
    assert "b = a + 1000\n" in (root / "pkg/changed_by_us.py").read_text(encoding="utf-8")
    assert "return 'ours'\n" in (root / "pkg/gone.py").read_text(encoding="utf-8")
    assert "deleted   changed_by_us.py: goes" in shown and "deleted   gone.py" in shown
    assert "gone.py deleted in pkg v1.5 and modified in ours." in shown
    assert "changed_by_us.py:3: not Python" in tool(root, "status")


def test_a_dirty_tree_and_files_in_the_way_are_refused(repos: tuple[Path, Path]) -> None:
    root, up = repos
    write(root / "pkg/brand_new.py", "not in git\n")
    before = state(root)
    assert "brand_new.py; move them elsewhere" in rebase(repos, "v1.3", code=1)
    assert state(root) == before
    (root / "pkg/brand_new.py").unlink()
    write(root / "README.md", "edited\n")
    before = state(root)
    assert "1 uncommitted change(s): README.md" in rebase(repos, "v1.3", code=1)
    assert state(root) == before
    git(root, "checkout", "--quiet", "README.md")
    assert "has no 'v7'" in rebase(repos, "v7", code=1)
    plain = ("--upstream", str(up / "pkg"))
    assert "is no git repository" in tool(root, "rebase", "pkg", "--tag", "v1.1", *plain, code=1)


def test_plain_git_subtree_goes_on_working(repos: tuple[Path, Path]) -> None:
    root, up = repos
    rebase(repos, "v1.1")
    git(up, "branch", "split-1.3", git(up, "subtree", "split", "-q", "--prefix=pkg", "v1.3"))
    git(root, "subtree", "pull", "-q", "--squash", "--prefix=pkg", str(up), "split-1.3")
    assert block(root, "new_name.py") and (root / "pkg/brand_new.py").exists()
    shown = rebase(repos, "v1.5", code=3)  # and what git subtree made is the base of the next rebase
    assert "renamed" not in shown and "new  " not in shown
    git(root, "merge", "--abort")
    split = git(root, "subtree", "split", "-q", "--prefix=pkg", "HEAD")
    assert git(root, "rev-parse", f"{split}^{{tree}}") == git(root, "rev-parse", "HEAD:pkg")
    upstream_split = git(up, "rev-parse", "split-1.3")
    assert git(root, "merge-base", split, upstream_split) == upstream_split


def test_the_merge_is_the_one_that_git_subtree_makes(repos: tuple[Path, Path]) -> None:
    root, up = repos
    shutil.copytree(root, root.parent / "theirs")
    git(root.parent / "theirs", "update-index", "-q", "--refresh")
    git(up, "branch", "split-1.3", git(up, "subtree", "split", "-q", "--prefix=pkg", "v1.3"))
    git(root.parent / "theirs", "subtree", "pull", "-q", "--squash", "--prefix=pkg", str(up), "split-1.3")
    rebase(repos, "v1.3")
    assert git(root, "rev-parse", "HEAD:pkg") == git(root.parent / "theirs", "rev-parse", "HEAD:pkg")
    assert git(root, "rev-parse", "HEAD^2^{tree}") == git(root.parent / "theirs", "rev-parse", "HEAD^2^{tree}")


def test_odd_files_arrive_as_they_are(tmp_path: Path) -> None:
    up, root = repository(tmp_path / "up"), repository(tmp_path / "ours")
    write(up / "run.sh", "echo 1\n")
    write(up / "becomes_folder", "file\n")
    write(up / "becomes_file/inner.txt", "inner\n")
    write(up / "windows.txt", "a\r\nb\r\nc\r\n")
    (up / "binary").write_bytes(bytes(range(256)))
    write(up / "template.py", "def {{ name }}(): ...\n")
    commit(up, "one", "v1")
    (up / "run.sh").chmod(0o755)
    (up / "becomes_folder").unlink()
    write(up / "becomes_folder/a b/ü.py", "X = 1\n")
    shutil.rmtree(up / "becomes_file")
    write(up / "becomes_file", "now a file\n")
    (up / "link").symlink_to("run.sh")
    (up / "binary").write_bytes(bytes(range(255, -1, -1)))
    commit(up, "two", "v2")
    write(root / "README.md", "ours\n")
    commit(root, "start")
    words = ("--upstream", str(up))
    tool(root, "import", "odd", "--files", "--tag", "v1", *words, "--licence", "MIT", "--folder", "third/odd")
    write(root / "third/odd/windows.txt", "a\r\nb\r\nc\r\nours\r\n")
    commit(root, "ours")
    assert "Done" in tool(root, "rebase", "odd", "--tag", "v2", *words)
    odd = root / "third/odd"
    assert os.access(odd / "run.sh", os.X_OK) and os.readlink(odd / "link") == "run.sh"
    assert (odd / "becomes_folder/a b/ü.py").exists() and (odd / "becomes_file").is_file()
    assert (odd / "binary").read_bytes() == (up / "binary").read_bytes()
    assert (odd / "windows.txt").read_bytes().endswith(b"c\r\nours\r\n")
    assert git(root, "status", "--porcelain") == ""


def test_a_conflict_in_a_marked_block_shows_both_sides_whole(repos: tuple[Path, Path]) -> None:
    root, up = repos
    text = (root / "pkg/clean.py").read_text(encoding="utf-8")
    write(root / "pkg/clean.py", text.replace("line_2 = 2\n", "@(inner): why; drop when never\nline_2 = 0\n@ END\n"))
    write(root / "tests/adaptations/removals.toml", (root / "tests/adaptations/removals.toml").read_text() + INNER)
    commit(root, "another block")
    shown = rebase((root, up), "v1.1", code=3)
    assert "CONFLICT (contents) pkg/clean.py" in shown
    merged = (root / "pkg/clean.py").read_text(encoding="utf-8")
    assert f"(inner): why; drop when never\nline_2 = 0\n{MARK} END\n=======\n" in merged
    assert "line_2 = 222\n" in merged and "line_29 = 2929\n" in merged


def test_a_subtree_that_git_subtree_added_is_rebased(repos: tuple[Path, Path]) -> None:
    root, up = repos
    git(up, "branch", "split-1", git(up, "subtree", "split", "-q", "--prefix=pkg", "v1"))
    git(root, "subtree", "add", "-q", "--squash", "--prefix=vendor/pkg", str(up), "split-1")
    text = (root / "third_party/pkg.toml").read_text(encoding="utf-8")
    write(
        root / "third_party/other.toml",
        text.replace('name = "pkg"', 'name = "other"').replace('subtree = "pkg"', 'subtree = "vendor/pkg"'),
    )
    commit(root, "its manifest")
    tool(root, "rebase", "other", "--tag", "v1.3", "--upstream", str(up))
    assert (root / "vendor/pkg/new_name.py").exists() and (root / "pkg/old_name.py").exists()
    assert git(root, "rev-parse", "HEAD:vendor/pkg") == git(up, "rev-parse", "v1.3:pkg")


def test_a_whole_repository_is_a_subtree_too(repos: tuple[Path, Path]) -> None:
    root, up = repos
    words = ("--folder", "whole", "--url", str(up), *LICENCE)
    tool(root, "import", "whole", "--files", "--tag", "v1", "--upstream", str(up), *words)
    assert git(root, "rev-parse", "HEAD:whole") == git(up, "rev-parse", "v1^{tree}")
    assert f"git-subtree-split: {git(up, 'rev-parse', 'v1')}" in git(root, "log", "-1", "--format=%B", "HEAD^2")
    tool(root, "rebase", "whole", "--tag", "v1.1", "--upstream", str(up))
    git(root, "subtree", "pull", "-q", "--squash", "--prefix=whole", str(up), "v1.3")
    assert git(root, "rev-parse", "HEAD:whole") == git(up, "rev-parse", "v1.3^{tree}")


def test_the_guards_find_what_a_text_merge_cannot_see() -> None:
    base, ours = {"a.py": "x = 1\n"}, {"a.py": f"x = 1\n{MARK}(keep): why; drop when never\ny = 2\nz = 3\n"}
    assert guards.lost_lines(base, ours, ours) == [] and guards.cut_blocks(ours, ours) == []
    assert "a.py: this line of ours is not in the merged files: z = 3" in guards.lost_lines(
        base, ours, {"b.py": ours["a.py"][:-6]}
    )
    torn = {"a.py": ours["a.py"].replace("y = 2", "<<<<<<< ours\ny = 2")}
    assert guards.cut_blocks(ours, torn) == ["a.py:2: the adaptation 'keep' is not as we wrote it any more"]
    before = {
        "p/m.py": "def f(): ...\ndef g(): return f()\n",
        "p/__init__.py": "",
        "u.py": "from p import m\nfrom .p.m import f as q\nm.f()\n",
    }
    after = before | {"p/m.py": "def g(): return f()\n"}
    assert [line.split(": uses")[0] for line in guards.broken_names(before, after)] == ["p/m.py:1", "u.py:3"]
    gone = {path: text for path, text in before.items() if path != "p/m.py"}
    assert [line.split(": uses")[0] for line in guards.broken_names(before, gone)] == ["u.py:1", "u.py:3"]
    assert guards.broken_names(before, before) == []
