"""The page of recorded samples: it needs nothing beside it, runs only its own script, filters and colours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tools.viewer.__main__ import EXIT_BAD_INPUT, main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Each would change the page's title if a browser took it for more than text.
RUN = "document.title='taken over'"
HOSTILE = [
    f"</script><script>{RUN}</script>",
    f'<img src=x onerror="{RUN}">',
    f"<svg/onload={RUN}>",
    f"<!--<script>{RUN}",
    f']]><a href="javascript:{RUN}">x</a>',
    f"\u2028{RUN}\u2029",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"'\"`;{RUN};//",
    f"<style>@import 'http://example.org/x'</style><meta http-equiv=refresh content='0;url=javascript:{RUN}'>",
]


def _record(step: int, number: int, **fields: Any) -> dict[str, Any]:
    record = {
        "step": step,
        "uid": f"{step}-{number // 2}",
        "data_source": "digits",
        "prompt": "What is 1 + 2?",
        "ground_truth": "3",
        "tokens": ["1 + 2", " =", " 3", "<eos>"],
        "rollout_log_probs": [-0.5, -0.25, -4.0, -0.125],
        "log_probs": [-0.5, -0.25, -2.0, None],
        "versions": [[step - 1, 4]],
        "reward": number / 10,
        "parts": {"score": number / 10},
        "advantage": 0.5,
        "length": 4 + number,
        "finish_reason": "stop",
    }
    return record | fields


def _write(run_dir: Path, step: int, records: list[dict[str, Any]]) -> None:
    (run_dir / "samples").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "samples" / f"step_{step}.jsonl").write_text(text)


class Parsed(HTMLParser):
    """Tags, what lies in scripts, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts.append(data)


def _hostile_run(run_dir: Path) -> list[dict[str, Any]]:
    records = []
    for number, text in enumerate(HOSTILE):
        texts = {"uid": text, "data_source": text, "prompt": text, "ground_truth": text, "finish_reason": text}
        records.append(_record(1, number, **texts, tokens=[text, "", text, text], parts={text: 1.0}))
    _write(run_dir, 1, records)
    return records


def test_hostile_texts_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "<b>&run"
    records = _hostile_run(run_dir)
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir}/samples.html: {len(HOSTILE)} samples\n"
    page = (run_dir / "samples.html").read_text(encoding="utf-8")
    parsed = Parsed()
    parsed.feed(page)
    assert parsed.tags.count("script") == 2 and not {"img", "svg", "a", "link", "iframe", "b"} & {*parsed.tags}
    assert not [name for name, _ in parsed.attributes if name in ("src", "href", "action") or name.startswith("on")]
    data, script = parsed.scripts[0], "".join(parsed.scripts[1:])
    assert not set("<>&") & set(data) and json.loads(data) == records
    assert "innerHTML" not in script and "eval(" not in script and "insertAdjacent" not in script
    assert "script-src 'sha256-" in page and "default-src 'none'" in page


def _open(page: Path, fragment: str, folder: Path) -> str:
    """The page as a browser has it after its scripts have run."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=2000", "--dump-dom", f"{page.absolute().as_uri()}#{fragment}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _rows(dom: str) -> list[list[str]]:
    body = dom[dom.index('<tbody id="rows">') : dom.index("</tbody>")]
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in body.split("</tr>")[:-1]]


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: the page is only parsed")


@needs_browser
@pytest.mark.timeout(90)
def test_a_browser_runs_nothing_that_a_model_wrote(tmp_path: Path) -> None:
    _hostile_run(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    dom = _open(tmp_path / "run" / "samples.html", "", tmp_path / "profile")
    assert "<title>run: samples</title>" in dom
    assert len(_rows(dom)) == len(HOSTILE), "the page's own script has run"
    assert "&lt;/script&gt;&lt;script&gt;document.title" in dom


@needs_browser
@pytest.mark.timeout(90)
def test_a_browser_filters_and_colours(tmp_path: Path) -> None:
    _write(tmp_path, 10, [_record(10, number) for number in range(6)])
    old, mixed = {"versions": [[3, 4]]}, {"versions": [[7, 2], [9, 2]], "data_source": "math"}
    _write(tmp_path, 20, [_record(20, 4, **old), _record(20, 5, **mixed), _record(20, 6)])
    assert main([str(tmp_path)]) == 0

    def shown(fragment: str) -> list[str]:
        dom = _open(tmp_path / "samples.html", fragment, tmp_path / "profile")
        assert f"{len(_rows(dom))} of 9 samples" in dom
        return [f"{step} {reward} {version}" for step, _, reward, _, version, _ in _rows(dom)]

    assert shown("reward_min=0.3&reward_max=0.5&sort=reward&length_max=8") == ["20 0.40 3", "10 0.40 9", "10 0.30 9"]
    assert shown("version_min=7&version_max=8") == ["20 0.50 7-9"]
    assert shown("step=10&group=10-1") == ["10 0.20 9", "10 0.30 9"]
    assert shown("source=math&text=1+%2B+2+%3D") == ["20 0.50 7-9"]
    dom = _open(tmp_path / "samples.html", "step=20&colour=difference", tmp_path / "profile")
    response = dom[dom.index('id="response"') :]
    tokens = re.findall(r'<span class="([^"]*)"(?: style="background-color: ([^;]*);")?>([^<]*)</span>', response)
    assert tokens == [
        ("token", "rgba(37, 99, 235, 0)", "1 + 2"),
        ("token", "rgba(37, 99, 235, 0)", " ="),
        ("token", "rgba(37, 99, 235, 0.75)", " 3"),
        ("token unknown", "", "&lt;eos&gt;"),
    ]


@needs_browser
@pytest.mark.timeout(90)
def test_small_differences_are_readable_beside_a_larger_one(tmp_path: Path) -> None:
    """A colour is of the order of magnitude, and the scale below the title names the magnitudes."""
    rollout, differences = [-0.5] * 5, (8e-6, 1e-6, -1e-6, 1e-7, 0.0)
    training = [value + difference for value, difference in zip(rollout, differences, strict=True)]
    _write(tmp_path, 1, [_record(1, 0, tokens=list("abcde"), rollout_log_probs=rollout, log_probs=training)])
    assert main([str(tmp_path)]) == 0
    dom = _open(tmp_path / "samples.html", "", tmp_path / "profile")
    marks = re.findall(r"<span>([^<]*)</span>", dom[dom.index('class="ticks"') : dom.index('id="response"')])
    assert marks == ["-1e-5", "-1e-6", "-1e-7", "0", "1e-7", "1e-6", "1e-5"]
    colours = re.findall(r"rgba\((\d+), \d+, \d+, ([\d.]+)\)", dom[dom.index('id="response"') :])
    assert [red for red, _ in colours] == ["37", "37", "220", "37", "37"]
    assert [float(opacity) for _, opacity in colours] == pytest.approx([0.726, 0.5, 0.5, 0.25, 0.0], abs=0.01)


def test_the_newest_steps_are_shown_or_those_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 10, 4):
        _write(tmp_path, step, [_record(step, number) for number in range(3)])
    output = tmp_path / "elsewhere.html"
    assert main([str(tmp_path), "--max-samples", "4", "--output", str(output)]) == 0
    assert "4 samples, 5 of earlier steps left out" in capsys.readouterr().out
    parsed = Parsed()
    parsed.feed(output.read_text(encoding="utf-8"))
    assert [record["step"] for record in json.loads(parsed.scripts[0])] == [10, 10, 10, 4]
    assert main([str(tmp_path), "--steps", "2,4"]) == 0
    assert capsys.readouterr().out.endswith("samples.html: 6 samples\n")


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "run", 3, [_record(3, 0)])
    _write(tmp_path / "broken", 3, [{"step": 3}])
    _write(tmp_path / "cut", 3, [])
    (tmp_path / "cut" / "samples" / "step_3.jsonl").write_text("{")
    _write(tmp_path / "bytes", 3, [])
    (tmp_path / "bytes" / "samples" / "step_3.jsonl").write_bytes(b"\xff")
    _write(tmp_path / "middle", 3, [])
    (tmp_path / "middle" / "samples" / "step_3.jsonl").write_text("{\n" + json.dumps(_record(3, 0)) + "\n")
    _write(tmp_path / "text", 3, [_record(3, 0, reward="high")])
    _write(tmp_path / "list", 3, [[1]])  # type: ignore[list-item]
    _write(tmp_path / "versions", 3, [_record(3, 0, versions=[3])])
    for arguments, message in (
        ([tmp_path / "absent"], "absent/samples has no step_N.jsonl: give a run's OUTPUT_DIR"),
        ([tmp_path / "run", "--steps", "3,7"], "--steps: 7 is not recorded; "),
        ([tmp_path / "run", "--max-samples", "0"], "--max-samples 0: it must be at least 1"),
        ([tmp_path / "broken"], "step_3.jsonl:1 is no record of a sample; it lacks ['advantage'"),
        ([tmp_path / "cut"], "cut/samples has no whole sample of step 3: its files are empty or cut"),
        ([tmp_path / "bytes"], "bytes/samples has no whole sample of step 3"),
        ([tmp_path / "middle"], "step_3.jsonl, line 1 is not JSON"),
        ([tmp_path / "text"], "step_3.jsonl:1 is no record of a sample; reward is 'high'"),
        ([tmp_path / "list"], "step_3.jsonl, line 1 is no record of this file: [1]"),
        ([tmp_path / "versions"], "step_3.jsonl:1 is no record of a sample; versions is [3]"),
    ):
        assert main([str(argument) for argument in arguments]) == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))


def test_what_json_of_a_browser_lacks_is_null_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    """One NaN would leave the whole page empty: JSON.parse fails on it."""
    nan, inf = float("nan"), float("inf")
    odd = _record(3, 0, reward=nan, advantage=-inf, log_probs=[nan, -0.5, inf, -2.0], parts={"score": nan, "kind": 1.0})
    _write(tmp_path, 3, [odd, _record(3, 1)])
    file = tmp_path / "samples" / "step_3.jsonl"
    text = file.read_text().replace("-0.25", "1e999", 1)
    file.write_bytes((text + json.dumps(_record(3, 2))).encode()[:-9] + "é".encode()[:1])
    assert main([str(tmp_path)]) == 0
    parsed = Parsed()
    parsed.feed((tmp_path / "samples.html").read_text(encoding="utf-8"))

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    first, second = json.loads(parsed.scripts[0], parse_constant=refused)
    assert (first["reward"], first["advantage"], first["parts"]) == (None, None, {"score": None, "kind": 1.0})
    assert first["log_probs"] == [None, -0.5, None, -2.0] and first["rollout_log_probs"] == [-0.5, None, -4.0, -0.125]
    assert second == _record(3, 1)
