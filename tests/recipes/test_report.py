"""tools/report on a made-up run: figures, a page that needs and trusts nothing, the closing summary."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.report.__main__ import main
from tools.report.curves import CHARTS, as_svg
from tools.report.run_data import read_run

EVIL = '<script>alert("x")</script><img src=http://example.org/x onerror=y>'


def write_run(run_dir: Path, num_steps: int = 20) -> None:
    lines = [{"step": 0, "val/score": 0.4, "val/format": 0.6, "val/accuracy": 0.3, "timing_s/testing": 2.0}]
    for step in range(1, num_steps + 1):
        part = step / num_steps
        row = {
            "step": step,
            "critic/score/mean": 0.4 + 0.5 * part,
            "reward/format": 0.6 + 0.4 * part,
            "reward/accuracy": 0.3 + 0.6 * part,
            "response_length/mean": 18.0 + part,
            "response_length/min": 5.0,
            "response_length/max": 64.0,
            "training/rollout_probs_diff_max": 1e-6 * step,
            "perf/throughput": 5000.0,
            "timing_s/step": 3.0,
            "timing_s/gen": 1.5,
            "timing_s/update_actor": 1.2,
        }
        if step % 5 == 0:
            row |= {"val/score": 0.4 + 0.5 * part, "val/format": 0.6 + 0.4 * part, "val/accuracy": 0.3 + 0.6 * part}
        lines.append(row)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, response in ((0, EVIL), (num_steps, "<think>1 + 1 = 2</think><answer>\\boxed{2}</answer>")):
        record = {"step": step, "prompt": "…<｜User｜>What is 1 + 1?<｜Assistant｜>", "response": response}
        record |= {"ground_truth": "2", "score": float(step > 0), "format": float(step > 0), "accuracy": 1.0}
        record |= {"ungraded": 0.0, "timeout": 0.0, "grader_error": float(step > 0)}
        (run_dir / "val_generations").mkdir(exist_ok=True)
        (run_dir / "val_generations" / f"step_{step}.jsonl").write_text(json.dumps(record) + "\n")


class Tags(HTMLParser):
    """Collects tag names and outside references."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.sources.append(value)


def test_report_of_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["--run-dir", str(tmp_path)]) == 0
    for name in ("rewards.png", "response_len.png", "val_score.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert not tags.tags & {"script", "img", "link", "iframe"}
    assert not tags.sources
    assert "&lt;script&gt;" in page
    assert "What is 1 + 1?" in page
    assert "0.40 → 0.90" in page
    assert page.count(">grader_error 1.00<") == 1, "failures are shown where there are any"
    assert not re.search(r">(ungraded|timeout|grader_error) 0", page)
    summary = capsys.readouterr().out
    assert "0.400 (step 0) -> 0.900 (step 20)" in summary
    assert "report.html" in summary
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


def test_report_during_a_run_with_little_logged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "critic/sc')
    assert main(["--run-dir", str(tmp_path)]) == 0
    assert len(read_run(tmp_path).metrics) == 1


def test_restarts_of_workers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    causes = ("rank 1 died <b>", "rank 3 died")
    lines = [{"time": 1.0, "step": 4 + i, "from_step": 3, "cause": cause} for i, cause in enumerate(causes)]
    (tmp_path / "restarts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--run-dir", str(tmp_path)]) == 0
    assert "2, in steps 4, 5" in capsys.readouterr().out
    assert "rank 1 died &lt;b&gt;" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_resume_with_another_reward_is_told_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert "change-" not in as_svg(read_run(tmp_path), CHARTS[0])
    entry = {"key": "custom_reward_function", "was": None, "now": ["<mine>.py (0123)", "compute_score", {}]}
    (tmp_path / "changes.jsonl").write_text(json.dumps({"step": 2, "changes": [entry]}) + "\n")
    assert main(["--run-dir", str(tmp_path)]) == 0
    assert "custom_reward_function, from step 2 on" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;mine&gt;.py (0123)" in page and "Resumed with another reward" in page
    assert as_svg(read_run(tmp_path), CHARTS[0]).count('id="change-2"') == 1


def test_nothing_to_report_on_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["--run-dir", str(tmp_path)]) == 2
    (tmp_path / "metrics.jsonl").write_text("x\n{}\n")
    assert main(["--run-dir", str(tmp_path)]) == 2


def test_ids_of_the_figures_do_not_collide(tmp_path: Path) -> None:
    write_run(tmp_path)
    main(["--run-dir", str(tmp_path)])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(clips) == len(set(clips))
