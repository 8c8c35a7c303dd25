"""Proves that each hardware adaptation is needed: a named test passes, and fails without the marked block.

Works on copies, the tree itself is never touched. `python -m tools.workshop.adaptations --prove [ID ...]` runs it,
tests/adaptations/test_removals.py holds it in CI.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tools.marks import COMMENT, ROOT, Adaptation, collect, listed_files

REGISTRY = Path("tests/adaptations/removals.toml")
SIMULATOR_ENV = Path("tests/npu/env.sh")
ENVS = ("main", "npu")
TIMEOUT_S = 240.0
AT_ONCE = 2  # proofs side by side: tests start processes of their own
# A test that fails for one of these shows that the code does not run without the block, not that the hardware needs it.
BROKEN_CODE = re.compile(r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError)\b")
RAISED = re.compile(r"(?!raise\b)[\w.]*(Error|Exception|Failed|Exit|Interrupt)\b")


class Proof(NamedTuple):
    """What the registry names for one id."""

    test: str  # pytest's node id
    env: str  # one of ENVS


class Verdict(NamedTuple):
    """What came of one proof; `is_proven` None: it could not run here, and `why` says what is missing."""

    id: str
    path: str
    test: str
    is_proven: bool | None
    why: str


class Outcome(NamedTuple):
    """What became of a test, and the message of its first failure or error."""

    kind: str  # "passed", "failure", "error" (outside of the test's body), "skipped", "timeout"
    message: str


def read_registry(root: Path, found: Iterable[Adaptation]) -> tuple[dict[str, Proof], list[str]]:
    """The proving tests by id, and what is wrong: malformed entries, ids without one, and entries without an id."""
    path, marked = root / REGISTRY, {adaptation.id: adaptation for adaptation in found}
    entries = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    proofs: dict[str, Proof] = {}
    problems: list[str] = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"test", "env"} or entry["env"] not in ENVS:
            problems.append(
                f'{REGISTRY}: "{name}" must be {{ test = "tests/...py::test_name", env = "main" or "npu" }}'
            )
            continue
        proofs[name] = Proof(**entry)
        file, _, function = entry["test"].partition("[")[0].partition("::")
        source = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
        if not function or f"def {function}(" not in source:
            problems.append(f'{REGISTRY}: "{name}" names {entry["test"]}, which is not there')
    problems += [
        f"{mark.path}:{mark.line}: '{name}' has no entry in {REGISTRY}: name the test that fails without the block"
        for name, mark in marked.items()
        if name not in entries
    ]
    problems += [f'{REGISTRY}: "{name}" is not the id of any mark' for name in proofs if name not in marked]
    return proofs, problems


def without_block(source: str, adaptation: Adaptation) -> str:
    """The file without what the mark covers; the mark itself stays. ValueError when it covers nothing that can go.

    With an END the block is what lies between the mark's comment and the END. Without one it is the statement after the
    comment: Python's own idea of its extent, or one line (and its continuations) in other files.
    """
    lines = source.splitlines(keepends=True)
    where = f"{adaptation.path}:{adaptation.line}"
    is_python = adaptation.path.endswith(".py")
    first = next((n for n in range(adaptation.line, len(lines)) if not COMMENT.match(lines[n])), len(lines))
    if adaptation.end_line is not None:
        last = adaptation.end_line - 1
    elif is_python:
        statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        ends = dict(map(_lines_of, reversed(statements)))  # the outermost of those that start on a line comes first
        if first + 1 not in ends:
            raise ValueError(
                f"{where}: no statement starts on the line after the mark's comment; close the block with END"
            )
        last = ends[first + 1]
    else:
        last = first + 1
        while last < len(lines) and lines[last - 1].rstrip().endswith("\\"):
            last += 1
    if not "".join(lines[first:last]).strip():
        raise ValueError(f"{where}: the mark covers no line")
    shorter = "".join(lines[:first] + lines[last:])
    if is_python:
        try:
            compile(shorter, adaptation.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{where}: without the block the file does not parse: {error}") from None
    return shorter


def _lines_of(node: ast.stmt) -> tuple[int, int]:
    """The first line of a statement, its decorators included, and the last."""
    parts: list[ast.stmt | ast.expr] = [node, *getattr(node, "decorator_list", [])]
    return min(part.lineno for part in parts), node.end_lineno or node.lineno


def prove(root: Path = ROOT, ids: Iterable[str] = ()) -> Iterator[Verdict]:
    """A verdict for each id (all without `ids`), in order, as soon as it is there.

    ValueError lists what is wrong with the marks or the registry.
    """
    found, problems = collect(root)
    proofs, wrong = read_registry(root, found)
    wanted = set(ids) or {adaptation.id for adaptation in found}
    problems += [*wrong, *(f"'{name}' is not the id of any mark" for name in wanted - {a.id for a in found})]
    if problems:
        raise ValueError("\n  ".join(["marks and proofs are not in order:", *problems]))
    chosen = [adaptation for adaptation in found if adaptation.id in wanted]
    environments = {env: environment_of(root, env) for env in {proofs[a.id].env for a in chosen}}

    def verdict(adaptation: Adaptation) -> Verdict:
        proof = proofs[adaptation.id]
        return Verdict(adaptation.id, adaptation.path, proof.test, *_judge(root, adaptation, proof, environments))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(verdict, chosen)


def _judge(
    root: Path, adaptation: Adaptation, proof: Proof, environments: Mapping[str, tuple[dict[str, str], str]]
) -> tuple[bool | None, str]:
    """(is_proven, why) by two runs of the test: on an untouched copy of the tree, and on one without the block."""
    environment, lacking = environments[proof.env]
    if lacking:
        return None, lacking
    try:
        shorter = without_block((root / adaptation.path).read_text(encoding="utf-8"), adaptation)
    except ValueError as error:
        return False, str(error)
    before = _run(root, proof.test, environment)
    if before.kind != "passed":
        is_missing_here = before.kind == "skipped" and proof.env == "npu"
        why = f"on the untouched tree the test did not pass ({before.kind}): {before.message}"
        return None if is_missing_here else False, why
    after = _run(root, proof.test, environment, {adaptation.path: shorter})
    if after.kind == "passed":
        return False, "the test passes without the block"
    if after.kind == "failure" and BROKEN_CODE.search(after.message):
        return False, f"without the block the code does not run at all, which proves nothing: {after.message}"
    if after.kind == "failure":
        return True, after.message
    return False, f"without the block the test did not fail but end in: {after.kind}: {after.message}"


def environment_of(root: Path, env: str) -> tuple[dict[str, str], str]:
    """The variables to run a test with, PYTHON among them, or what this machine lacks for it."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if env == "main":
        return base | {"PYTHON": sys.executable, "PYTHONPATH": str(root)}, ""
    if not (root / SIMULATOR_ENV).is_file():
        return {}, f"the simulator's environment is not there: {SIMULATOR_ENV} is missing"
    sourced = subprocess.run(
        ["bash", "-c", f"source {SIMULATOR_ENV} >&2 && env -0"], cwd=root, env=base, capture_output=True, text=True
    )
    if sourced.returncode != 0:
        return {}, f"no simulator here: {_last_line(sourced.stderr)}"
    variables = dict(item.partition("=")[::2] for item in sourced.stdout.split("\0") if "=" in item)
    python = variables.get("NPU_PYTHON", "")
    if not python or not shutil.which(python):
        return {}, f"no simulator here: {SIMULATOR_ENV} names no Python (NPU_PYTHON={python!r})"
    return variables | {"PYTHON": python}, ""


def _run(root: Path, test: str, environment: dict[str, str], changed: Mapping[str, str] | None = None) -> Outcome:
    """Run a test in a copy of the tree's tracked and new files, importing from that copy alone; ends all it started."""
    with tempfile.TemporaryDirectory(prefix="removal-") as folder:
        copy = Path(folder) / "tree"
        for name in listed_files(root):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        for name, text in (changed or {}).items():
            (copy / name).write_text(text, encoding="utf-8")
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        moved = [str(copy), *(p.replace(str(root), str(copy), 1) for p in paths if p and p != str(root))]
        variables = environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(moved))}
        report, python = copy / "report.xml", environment["PYTHON"]
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}", test]
        process = subprocess.Popen(
            command, cwd=copy, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", f"still running after {TIMEOUT_S:.0f} s")
        finally:
            _end(process)
        if process.returncode not in (0, 1) or not report.exists():
            return Outcome("error", f"pytest ended with {process.returncode}: {_last_line(output)}")
        return _outcome(ElementTree.parse(report).iter("testcase"))


def _end(process: subprocess.Popen[str]) -> None:
    """End a run that is not over, with all that it started."""
    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.communicate()


def _outcome(cases: Iterable[ElementTree.Element]) -> Outcome:
    """The worst of a test's cases, one for each of its parameters."""
    results = {result.tag: result for case in cases for result in case}
    for kind in ("error", "failure", "skipped"):
        if kind in results:
            return Outcome(kind, _reason(results[kind]))
    return Outcome("passed", "")


def _reason(result: ElementTree.Element) -> str:
    """The failure in one line: what was raised, and of a report on other processes what the first of them raised."""
    lines = [line[1:].strip() for line in (result.text or "").splitlines() if line.startswith("E ")]
    raised = [line for line in lines if RAISED.match(line)]
    if len(raised) > 1 and raised[0].startswith("RuntimeError: ranks failed"):  # tests/parallel/launcher.py
        reason = raised[1]
    else:
        reason = (raised or lines or [result.get("message") or "no message"])[-1 if raised else 0]
    return reason[:240]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
