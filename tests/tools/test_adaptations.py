"""The list of hardware adaptations is complete, and wrong marks are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import marks
from tools.workshop import adaptations, removals

MARK = "# " + marks.WORD  # assembled, so that this file carries no mark of its own


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("@", MARK), encoding="utf-8")


def register(root: Path, *ids: str) -> None:
    plant(root, "tests/test_a.py", "def test_a():\n    pass\n")
    entries = [f'"{name}" = {{ test = "tests/test_a.py::test_a", env = "main" }}\n' for name in ids]
    plant(root, str(removals.REGISTRY), "".join(entries))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "third_party").mkdir()
    return tmp_path


def test_marks_are_listed_with_reason_and_condition(tree: Path) -> None:
    plant(
        tree,
        "a/x.py",
        "def f():\n    @(kv-blocks): the pool must not move;\n    # drop when sleep frees memory.\n    g()\n",
    )
    register(tree, "kv-blocks", "no-jit")
    plant(tree, "b/y.sh", "@(no-jit): compilation stalls; drop when CANN 9\nexport A=1\nexport B=1\n@ END\n")
    assert "2 adaptation(s)" in adaptations.run(tree, check=False)
    written = (tree / adaptations.OUTPUT).read_text(encoding="utf-8")
    assert (
        "| `kv-blocks` | `a/x.py` | the pool must not move | sleep frees memory | `tests/test_a.py::test_a` |"
        in written
    )
    assert "| `no-jit` | `b/y.sh` | compilation stalls | CANN 9 | `tests/test_a.py::test_a` |" in written
    assert "in order" in adaptations.run(tree, check=True)


def test_moving_a_mark_inside_its_file_needs_no_new_list(tree: Path) -> None:
    register(tree, "one")
    plant(tree, "x.py", "@(one): a; drop when b\ny = 1\n")
    adaptations.run(tree, check=False)
    plant(tree, "x.py", "z = 0\n\n@(one): a; drop when b\ny = 1\n")
    adaptations.run(tree, check=True)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("@(one): a; drop when b\n@(one): c; drop when d\n", "already used"),
        ("@ END\n", "END closes nothing"),
        ("@(one): a; drop when b\n@ END\n@ END\n", "END closes nothing"),
        ("@(one): no condition\n", "expected"),
        ("@(Not An Id): a; drop when b\n", "expected"),
        ("@: a; drop when b\n", "expected"),
    ],
)
def test_a_wrong_mark_is_named_with_its_place(tree: Path, source: str, complaint: str) -> None:
    plant(tree, "x.py", source)
    with pytest.raises(ValueError, match=rf"x\.py:\d+: .*{complaint}"):
        adaptations.run(tree, check=True)


def test_a_mark_without_a_proving_test_is_an_error(tree: Path) -> None:
    plant(tree, "x.py", "@(one): a; drop when b\ny = 1\n")
    with pytest.raises(ValueError, match=r"x\.py:1: 'one' has no entry"):
        adaptations.run(tree, check=False)
    assert "`one`" in (tree / adaptations.OUTPUT).read_text(encoding="utf-8")


def test_a_stale_list_is_an_error(tree: Path) -> None:
    adaptations.run(tree, check=False)
    register(tree, "new")
    plant(tree, "x.py", "@(new): a; drop when b\ny = 1\n")
    with pytest.raises(ValueError, match="run `python -m tools.workshop.adaptations`"):
        adaptations.run(tree, check=True)
