"""A rebase between two released packages: where they come from, and the list of work with names and keys."""

from __future__ import annotations

import resource
import zipfile
from pathlib import Path

import pytest

from tests.tools.subtree_repos import LINES, ROOT, tool, write
from tools.subtree import configs, keys

pytest.importorskip("pip")
MANIFEST = """name = "up"
url = "file:///no/such/repository"
licence = "MIT"
subtree = "ours"
upstream_root = "pkg"
package = "the-pkg"
configs = ["config/ppo_*.yaml", "later/*/ppo_*.yaml"]
tag = "v1.0"
mirrored = ["a.py", "left.py", "*/tools.py"]
"""
OLD = {
    "a.py": "def kept(x): ...\ndef moved(y): ...\ndef unused(): ...\nclass C:\n    x: int\n    y: int\n",
    "left.py": "def of_left(): ...\n" + LINES,
    "sub/__init__.py": "# the same text\n",
    "beside.py": "def ours_has(x): ...\ndef ours_lacks(): ...\n",
    "config/ppo_trainer.yaml": "defaults:\n  - part@algorithm: part\n  - _self_\n"
    "trainer: {_target_: t.C, total_epochs: 30, nnodes: 1, no_such_key: 1}\n"
    "critic: {enable: false}\n",
    "config/part/part.yaml": "gamma: 1.0\nadv_estimator: gae\n",
}
NEW = {
    "a.py": "def kept(x, scale=1): ...\ndef fresh(z, *, w=1): ...\nclass C:\n    x: int\n    z: int\n",
    "b.py": "def moved(y): ...\ndef of_left(): ...\n",
    "other/__init__.py": "# the same text\n",
    "beside.py": "def ours_has(x, y): ...\n",
    "config/ppo_trainer.yaml": "defaults:\n  - model_engine: dp\n  - part@algorithm: part\n  - _self_\n"
    "trainer: {_target_: t.C, total_epochs: 15, nnodes: 1, later: {no_such_key: 2}}\n"
    "critic: {enable: '${algorithm.gamma}'}\n",
    "config/model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp\n",
    "config/model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron\n"
    "trainer: {val_before_train: True}\n",
    "config/part/part.yaml": "gamma: 1.0\nadv_estimator: grpo\nnew_switch: 1e-6\n",
    "later/config/ppo_async.yaml": "defaults: [ppo_trainer, _self_]\n"
    "hydra: {searchpath: ['pkg://verl.trainer.config']}\ntrainer: {n_gpus_per_node: 4}\n",
}


def wheel(folder: Path, version: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    info = f"the_pkg-{version}.dist-info"
    with zipfile.ZipFile(folder / f"the_pkg-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(f"pkg/{name}", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: the-pkg\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two released versions, which is all that pip finds."""
    wheel(tmp_path / "index", "1.0", OLD)
    wheel(tmp_path / "index", "1.1", NEW)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "index"


def ours(root: Path) -> Path:
    write(root / "third_party/up.toml", MANIFEST)
    write(root / "ours/a.py", "def kept(x): ...\nclass C:\n    x: int\n")
    write(root / "ours/left.py", "def of_left(): ...\n")
    write(root / "ours/beside.py", "def ours_has(x): ...\n")
    write(root / "ours/deep/fresh.py", "def fresh(z, *, w=2): ...\n")
    return root


def test_two_released_versions_give_a_list_of_work(tmp_path: Path, index: Path) -> None:
    root, file = ours(tmp_path / "repo"), tmp_path / "list.md"
    shown = tool(root, "rebase", "up", "--tag", "v1.1", "--list", str(file))
    assert f"The list is in {file}." in shown
    lines = file.read_text(encoding="utf-8").splitlines()
    for name in ("the_pkg-1.0", "the_pkg-1.1"):
        source = f"{name}-py3-none-any.whl of the package index (file:///no/such/repository cannot be reached)"
        assert source in lines[2]
    expected = (
        "- [ ] `left.py` is gone; `of_left` is in `b.py` now; ours: ours/left.py; correct `mirrored` in "
        "third_party/up.toml",
        "- [x] `a.py`: `moved` is in `b.py` now; not here",
        "- [ ] `a.py`: `kept` `(x)` -> `(x, scale=)`; ours: ours/a.py `(x)`",
        "- [ ] `a.py`: `C`; gains `z`; loses `y`; ours: ours/a.py",
        "- [ ] `beside.py`: `ours_has` `(x)` -> `(x, y)`; ours: ours/beside.py `(x)`",
        "- [x] `a.py`: `fresh` `(z, *, w=)`; ours: ours/deep/fresh.py",
        "- [x] `trainer.no_such_key` -> `trainer.later.no_such_key`; not accepted here; the new name is not accepted "
        "here",
        "- [x] `algorithm.adv_estimator` `'gae'` -> `'grpo'`; acted on, `'grpo'` here",
        "- [ ] `trainer.total_epochs` `30` -> `15`; acted on, `1` here",
        "- [ ] `algorithm.new_switch` `1e-06`; not accepted here",
        "- [ ] `trainer.later.no_such_key` `2`; not accepted here",
        "- [x] `trainer.val_before_train` `True`; acted on, `True` here",
    )
    assert [line for line in expected if line not in lines] == []
    text = "\n".join(lines)
    assert "ours_lacks" not in text and "_target_" not in text and "__init__" not in text
    titles = ("Modules", "Names", "Signatures", "New names", "Keys with", "New keys")
    assert sorted(titles, key=lambda title: text.index(f"## {title}")) == list(titles)
    assert lines[-1].startswith(f"{text.count('- [')} changes: {text.count('- [ ]')} to do")
    for archive in index.glob("*.whl"):
        archive.unlink()
    again = tool(root, "rebase", "up", "--tag", "v1.1")  # both are in the cache
    assert lines[-1] in again and "Nothing changes" in tool(root, "rebase", "up", "--from", "v1.1", "--tag", "v1.1")


def test_a_version_that_is_not_released_and_a_tag_without_a_version_are_refused(tmp_path: Path, index: Path) -> None:
    root = ours(tmp_path / "repo")
    spec = ("--upstream", "pypi:the-pkg")
    assert "pip download: ERROR" in tool(root, "rebase", "up", "--tag", "v7.0", *spec, code=1)
    assert "a tag that ends in a version" in tool(root, "rebase", "up", "--tag", "main", *spec, code=1)
    assert "a name, and a tag" in tool(root, "diff", "up", "--upstream", "pypi:../x", code=1)
    assert "2 modules on both sides" in tool(root, "diff", "up", "--tag", "v1.1", *spec)


def test_modules_of_an_older_tag_keep_their_api_and_are_no_work(tmp_path: Path, index: Path) -> None:
    root = ours(tmp_path / "repo")
    tool(root, "import", "up")
    assert "has no left.py: correct 'mirrored'" in tool(root, "import", "up", "--tag", "v1.1", code=1)
    older = MANIFEST.replace(' "left.py",', "") + 'older = ["left.py"]\nolder_tag = "v1.0"\n'
    write(root / "third_party/up.toml", older)
    assert "- [x] `left.py` is gone" in tool(root, "rebase", "up", "--tag", "v1.1")
    tool(root, "import", "up", "--tag", "v1.1")
    recorded = (root / "third_party/api/up.txt").read_text(encoding="utf-8")
    assert "pin v1.1" in recorded and "## left.py\nof_left ()" in recorded and "fresh (z, *, w=)" in recorded
    shown = tool(root, "status")
    assert "up: modules of v1.0: left.py" in shown and "no recorded API" not in shown
    shown = tool(root, "diff", "up", "--tag", "v1.1")
    assert "of v1.0: left.py" in shown and "ours only: deep/fresh.py" in shown
    (root / "ours/left.py").unlink()
    assert "left.py" in tool(root, "status").partition("up: modules")[0]


def test_keys_of_every_engine_and_schedule_are_read_without_resolving_them(tmp_path: Path) -> None:
    for name, text in NEW.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = configs.defaults(tmp_path, ("config/ppo_*.yaml", "later/*/ppo_*.yaml"))
    assert found["trainer.nnodes"] == dict.fromkeys(
        ("ppo_trainer", "ppo_async", "model_engine_dp", "model_engine_megatron"), 1
    )
    assert found["trainer.n_gpus_per_node"] == {"ppo_async": 4}
    assert found["trainer.val_before_train"] == {"model_engine_megatron": True}
    assert found["critic.enable"]["ppo_trainer"] == "${algorithm.gamma}"


def test_a_key_is_renamed_where_its_last_part_and_one_more_stay() -> None:
    def renamed(old: str, *new: str) -> list[str]:
        found = keys.changes({old: {"c": 1}}, {key: {"c": 1} for key in new})
        return [text.partition(";")[0] for heading, _, text in found if heading == keys.RENAMED]

    assert renamed("a.b.size", "a.c.b.size", "d.size") == ["`a.b.size` -> `a.c.b.size`"]
    assert renamed("a.b.size", "c.d.size", "a.b.sizes") == []


def _seconds_of_children() -> float:
    """Of processors: other tests beside this one take no part in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow  # two wheels from the package index
def test_the_rebase_of_verl_takes_less_than_a_minute(tmp_path: Path) -> None:
    file, start = tmp_path / "list.md", _seconds_of_children()
    try:
        tool(ROOT, "rebase", "verl", "--from", "v0.6.1", "--tag", "v0.9.0", "--list", str(file))
    except AssertionError as error:
        if "cannot" not in str(error) and "pip download" not in str(error):
            raise
        pytest.skip(f"neither verl's repository nor its released packages can be reached: {error}")
    assert _seconds_of_children() - start < 60
    text = file.read_text(encoding="utf-8")
    assert "`actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes`" in text
    assert "`workers/megatron_workers.py` is gone" in text
