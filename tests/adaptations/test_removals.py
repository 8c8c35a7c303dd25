"""Every hardware adaptation has a test that fails without it."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tools import marks
from tools.workshop import adaptations, removals

ROOT = marks.ROOT
FOUND, PROBLEMS = marks.collect(ROOT)
MARK = "# " + marks.WORD  # assembled, so that this file carries no mark of its own


def test_marks_registry_and_document_agree() -> None:
    assert not PROBLEMS
    assert not removals.read_registry(ROOT, FOUND)[1]
    adaptations.run(ROOT, check=True)
    document = (ROOT / adaptations.OUTPUT).read_text(encoding="utf-8")
    for mark in FOUND:
        assert f"| `{mark.id}` | `{mark.path}` |" in document


def test_git_grep_finds_the_same_marks() -> None:
    grep = subprocess.run(
        ["git", "grep", "--untracked", "-hoE", rf"^ *{MARK}\([a-z0-9-]+\)"], cwd=ROOT, capture_output=True, text=True
    )
    if grep.returncode not in (0, 1) or not (ROOT / ".git").exists():
        pytest.skip("the tree came without git")
    assert sorted(line.split("(")[1].rstrip(")") for line in grep.stdout.splitlines()) == sorted(a.id for a in FOUND)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, removals.Verdict]:
    """The proofs of the selected ids, run two at a time."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    selected = {item.callspec.params["mark"].id for item in items if item.name.startswith("test_fails_without[")}
    return {verdict.id: verdict for verdict in removals.prove(ROOT, selected)}


@pytest.mark.parametrize("mark", FOUND, ids=[mark.id for mark in FOUND])
def test_the_block_can_be_removed(mark: adaptations.Adaptation) -> None:
    """Without the block the file still parses; the registry has a test that proves the block."""
    registry, _ = removals.read_registry(ROOT, FOUND)
    assert mark.id in registry
    source = (ROOT / mark.path).read_text(encoding="utf-8")
    assert len(removals.without_block(source, mark)) < len(source)


@pytest.mark.slow  # the default run has each proving test on the whole tree, and the way of a proof (test_verdicts)
@pytest.mark.timeout(3600)  # of the first test, which waits for all proofs; every proof has its own limit
@pytest.mark.parametrize("mark", FOUND, ids=[mark.id for mark in FOUND])
def test_fails_without(mark: marks.Adaptation, verdicts: dict[str, removals.Verdict]) -> None:
    verdict = verdicts[mark.id]
    if verdict.is_proven is None:
        pytest.skip(verdict.why)
    assert verdict.is_proven, f"{verdict.test}: {verdict.why}"


def plant(root: Path, source: str, test: str, env: str = "main", name: str = "pad") -> None:
    """A marked file in a tree, and the test that is to prove it."""
    files = {f"{name}.py": source.replace("@(pad)", f"{MARK}({name})")}
    files[f"tests/test_{name}.py"] = f"from {name} import width\n\n\n{test}"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    registry = root / removals.REGISTRY
    registry.parent.mkdir(parents=True, exist_ok=True)
    with registry.open("a", encoding="utf-8") as proofs:
        proofs.write(f'"{name}" = {{ test = "tests/test_{name}.py::test_width", env = "{env}" }}\n')


GOOD = (
    "def width(n: int) -> int:\n    @(pad): even sizes only; drop when odd ones work.\n    n += n % 2\n    return n\n"
)


# id -> (marked file, its test, is_proven, why)
VERDICTS = {
    "good": (GOOD, "def test_width():\n    assert width(3) == 4\n", True, "assert"),
    "needless": (GOOD, "def test_width():\n    assert width(4) == 4\n", False, "passes without the block"),
    "broken": (GOOD, "def test_width():\n    assert width(4) == 3\n", False, "on the untouched tree"),
    "nameless": (
        "def width(n: int) -> int:\n    @(pad): even; drop when odd.\n    m = n + n % 2\n    return m\n",
        "def test_width():\n    assert width(3) == 4\n",
        False,
        "does not run at all",
    ),
    "unimportable": (
        "@(pad): even; drop when odd.\ndef width(n: int) -> int:\n    return n + n % 2\n",
        "def test_width():\n    assert width(3) == 4\n",
        False,
        "did not fail but end in: error",
    ),
    "unparsable": (
        "def width(n: int) -> int:\n    @(pad): even; drop when odd.\n    return n + n % 2\n",
        "def test_width():\n    assert width(3) == 4\n",
        False,
        "does not parse",
    ),
}


def test_verdicts(tmp_path: Path) -> None:
    for name, (source, test, _, _) in VERDICTS.items():
        plant(tmp_path, source, test, name=name)
    before = {path: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.py")}
    found = {verdict.id: verdict for verdict in removals.prove(tmp_path)}
    assert len(found) == len(before) == len(VERDICTS)
    for name, (_, _, is_proven, why) in VERDICTS.items():
        verdict = found[name]
        assert verdict.is_proven is is_proven and why in verdict.why, verdict
    assert {path: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.py")} == before


def test_without_a_simulator_the_proof_is_skipped_with_the_reason(tmp_path: Path) -> None:
    plant(tmp_path, GOOD, "def test_width():\n    assert width(3) == 4\n", env="npu")
    [verdict] = removals.prove(tmp_path)
    assert verdict.is_proven is None and "tests/npu/env.sh" in verdict.why


@pytest.mark.parametrize(
    ("name", "source", "left"),
    [
        ("a.py", "x = 0\n@(pad): a;\n# drop when b.\nif x:\n    x = (\n        2\n    )\ny = 1\n", "x = 0\ny = 1\n"),
        ("a.py", "@(pad): a; drop when b.\n@property\ndef f():\n    pass\n\n\ny = 1\n", "\n\ny = 1\n"),
        ("a.py", "@(pad): a; drop when b.\nx = 1\n\nx = 2\n@ END\ny = 1\n", "y = 1\n"),
        ("a.sh", "@(pad): a; drop when b.\nexport A=1 \\\n  B=2\nexport C=3\n", "export C=3\n"),
        ("a.yaml", "a:\n  @(pad): a; drop when b.\n  b: 1\n  c: 2\n  @ END\n  d: 3\n", "a:\n  d: 3\n"),
    ],
)
def test_the_block_is_what_the_mark_covers(name: str, source: str, left: str) -> None:
    lines = source.replace("@(", MARK + "(").replace("@ END", MARK + " END")
    [mark], problems = marks.parse(name, lines.splitlines())
    assert not problems
    kept = [line for line in removals.without_block(lines, mark).splitlines(keepends=True) if "#" not in line]
    assert "".join(kept) == left


def test_registry_mistakes_are_named(tmp_path: Path) -> None:
    plant(tmp_path, GOOD, "def test_width():\n    assert width(3) == 4\n")
    registry = tmp_path / removals.REGISTRY
    registry.write_text(
        textwrap.dedent("""\
        "gone" = { test = "tests/test_pad.py::test_width", env = "main" }
        "renamed" = { test = "tests/test_pad.py::test_other", env = "main" }
        "odd" = { test = "tests/test_pad.py::test_width", env = "gpu" }
        """)
    )
    problems = "\n".join(removals.read_registry(tmp_path, marks.collect(tmp_path)[0])[1])
    for expected in ("'pad' has no entry", '"gone" is not the id', "test_other, which is not there", '"odd" must be'):
        assert expected in problems
