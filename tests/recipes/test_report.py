"""tools/report on a made-up run: figures, a page that needs and trusts nothing, the closing summary."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.report import page
from tools.report.__main__ import main
from tools.report.curves import CHARTS, Chart, as_svg, draw
from tools.report.page import tiles
from tools.report.phases import phases
from tools.report.run_data import read_run
from tools.report.summary import closing_summary

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
            "actor/kl_loss": 1e-3 * step,
            "actor/entropy": 0.2,
            "actor/grad_norm": 0.3,
            "actor/pg_clipfrac": 0.0,
            "perf/throughput": 5000.0,
            "timing_s/step": 3.0,
            "timing_s/gen": 1.5,
            "timing_s/update_weights": 0.25,
            "timing_s/generate_sequences": 1.0,
            "timing_s/generation_timing/max": 1.0,
            "timing_s/generation_timing/min": 0.75,
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


def test_every_curve_is_on_the_page_with_its_last_value(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = read_run(tmp_path)
    texts = {chart.name: re.findall(r"<text[^>]*>([^<]*)</text>", as_svg(run, chart)) for chart in CHARTS}
    assert len(CHARTS) % 2 == 0, "two in a row"
    for name, label in (
        ("rewards", "accuracy 0.90"),
        ("response_len", "mean 19.0"),
        ("kl", "from reference 0.02"),
        ("entropy", "entropy 0.2"),
        ("grad_norm", "norm 0.3"),
        ("clip_fraction", "clipped ratio 0"),
        ("gap", "largest 2.0e-05"),
    ):
        assert label in texts[name], f"{name}: {texts[name]}"
        assert "nothing logged" not in texts[name]


def test_axes_hold_every_value(tmp_path: Path) -> None:
    """Scores below 0 are seen, a gap has a logarithmic axis, and one of exact log-probs does not fail."""
    write_run(tmp_path)
    rewards, gap = (next(chart for chart in CHARTS if chart.name == name) for name in ("rewards", "gap"))

    def bounds(chart: Chart) -> tuple[float, float]:
        return draw(read_run(tmp_path), chart).axes[0].get_ylim()

    assert bounds(rewards)[0] == 0.0 and 1.0 < bounds(rewards)[1] < 1.1
    assert bounds(gap) == (1e-6, 1e-4)
    line = {"step": 1, "critic/score/mean": -1.0, "training/rollout_probs_diff_max": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert bounds(rewards)[0] < -1.0 and bounds(gap)[0] == 0.0


def test_phases_are_within_the_one_that_contains_them(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = [(each.name, each.depth, each.start_s, each.seconds) for each in phases(read_run(tmp_path))]
    assert found == [
        ("step", 0, 0.0, 3.0),
        ("gen", 1, 0.0, 1.5),
        ("update_weights", 2, 0.0, 0.25),
        ("generate_sequences", 2, 0.25, 1.0),
        ("generation_timing/min", 3, 0.25, 0.75),
        ("update_actor", 1, 1.5, pytest.approx(1.2)),
        ("anything else", 1, pytest.approx(2.7), pytest.approx(0.3)),
        ("testing", 0, 0.0, 2.0),
    ]
    assert main(["--run-dir", str(tmp_path)]) == 0
    bars = re.findall(r'class="bar (\S+)[^"]*" style="margin-left:([\d.]+)%;width:([\d.]+)%', _page(tmp_path))
    assert bars[:4] == [
        ("depth0", "0.00", "100.00"),
        ("depth1", "0.00", "50.00"),
        ("depth2", "0.00", "8.33"),
        ("depth2", "8.33", "33.33"),
    ]


def test_generation_on_ranks_of_their_own_is_beside_the_step(tmp_path: Path) -> None:
    line = {"step": 1, "timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/generate_sequences": 1.75}
    line |= {"timing_s/decode/mean": 0.5, "timing_s/environment/max": 1.0}  # of samples: no phases
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"schedule/staleness/mean": 1.0}) + "\n")
    found = [(each.name, each.depth, each.seconds) for each in phases(read_run(tmp_path))]
    assert found == [("step", 0, 2.0), ("gen", 1, 0.5), ("anything else", 1, 1.5), ("generate_sequences", 0, 1.75)]


@pytest.mark.parametrize("num_tiles", range(2, 14))
def test_no_tile_is_alone_in_a_row(num_tiles: int) -> None:
    shown = re.findall(r'class="tile( [^"]*)?"', tiles([("what", "1")] * num_tiles))
    for columns in (4, 2):
        rows, room = [0], columns
        for kinds in shown:
            width = 2 if f"wide{columns}" in kinds else 1
            if width > room:
                rows, room = [*rows, 0], columns
            rows[-1], room = rows[-1] + 1, room - width
        assert room == 0, f"{columns} columns: the last row has room for {room} more"
        assert min(rows) > 1 or columns == 2, rows


def _page(run_dir: Path) -> str:
    return (run_dir / "report.html").read_text(encoding="utf-8")


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
    for chart in CHARTS:
        svg = as_svg(read_run(tmp_path), chart)
        assert svg.count('id="change-2"') == (1 if "nothing logged" not in svg else 0), chart.name
        assert "nothing logged" in svg or ">other reward</text>" in svg, chart.name


def test_whether_it_learned_and_its_signs_are_on_the_first_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    assert main(["--run-dir", str(tmp_path)]) == 0
    page, shown = (tmp_path / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    assert page.index("signs of not learning: none") < page.index("<h2>Curves</h2>")
    assert "signs of not learning: none" in re.sub(r"[\s│]+", " ", shown)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row |= {"val/problems": 300} if "val/score" in row else {}
        row |= {"signs/no_format": 1.0} if row["step"] in (3, 4, 5, 9) else {}
        row |= {"signs/answers_cut": 1.0, "critic/score/min": None} if row["step"] == 4 else {}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--run-dir", str(tmp_path)]) == 0
    page, shown = (tmp_path / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    first_screen = page[: page.index("<h2>Curves</h2>")]
    assert "it has learned: validation score 0.400 [" in first_screen and "300 problems" in first_screen
    assert first_screen.index("<td>answers_cut</td><td>4</td>") < first_screen.index(
        "<td>no_format</td><td>3-5, 9</td>"
    )
    assert "raise data.max_response_length" in first_screen
    assert "no_format (4 steps)" in re.sub(r"[\s│]+", " ", shown)


def test_nothing_to_report_on_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["--run-dir", str(tmp_path)]) == 2
    for damaged in (b"x\n{}\n", b'{"step": 1, "critic/score/mean": "high"}\n', b"[1]\n", b"\xff\n"):
        (tmp_path / "metrics.jsonl").write_bytes(damaged)
        assert main(["--run-dir", str(tmp_path)]) == 2
        assert "metrics.jsonl" in capsys.readouterr().out.replace("\n", "")


def test_ids_of_the_figures_do_not_collide(tmp_path: Path) -> None:
    write_run(tmp_path)
    main(["--run-dir", str(tmp_path)])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(clips) == len(set(clips))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("places", "junk"),
    [([0], NAN), ([4], INF), ([-1], -INF), ([0, -1], None), (range(9), NAN), ([1], 10**400)],
    ids=["first", "middle", "last", "both ends", "all", "huge"],
)
def test_what_is_no_number_is_a_gap(tmp_path: Path, places: Sequence[int], junk: float | None) -> None:
    """In the first, a middle, the last or all of the steps of every metric: the other steps are drawn as they are."""
    write_run(tmp_path, 8)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    want = {metric: read_run(tmp_path).series(metric) for chart in CHARTS for metric in chart.curves.values()}
    steps = {rows[place]["step"] for place in places}
    for place in places:
        rows[place] = {name: value if name == "step" else junk for name, value in rows[place].items()}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    for chart in CHARTS[:2] + CHARTS[-1:]:
        lines = draw(run, chart).axes[0].get_lines()
        kept = [[point for point in want[metric] if point[0] not in steps] for metric in chart.curves.values()]
        drawn = [[(x, y) for x, y in zip(*line.get_data(), strict=True) if y == y] for line in lines]
        assert drawn == [points for points in kept if points], chart.name
    closing_summary(run)
    assert page.phases(run) is not None and "training steps" in page._head(run)


def test_a_value_between_two_gaps_is_a_dot(tmp_path: Path) -> None:
    values = [NAN, 0.5, NAN, 0.6, 0.7, NAN, 0.8]
    rows = [{"step": step, "critic/score/mean": value} for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = draw(read_run(tmp_path), CHARTS[0]).axes[0].get_lines()
    assert line.get_markevery() == [1, 6] and [y != y for y in line.get_ydata()] == [y != y for y in values]


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1}],
        [{"step": 1, "perf/throughput": 1.0}],
        [{"step": 1, "timing_s/step": 1.0, "perf/throughput": 2.0}, {"step": 2, "val/score": 0.5}],
        [{"step": 1, "timing_s/testing": NAN}, {"step": 2, "timing_s/step": NAN, "timing_s/gen": 1.0}],
        [{"step": 1, "memory/update/allocated_gb": NAN, "memory/update/rank": 0.0}],
        [{"step": 0, "val/score": NAN}, {"step": 0, "val/score": 0.5}],
    ],
)
def test_metrics_that_are_not_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, float]]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "né')
    closing_summary(read_run(tmp_path))
    monkeypatch.setattr(page, "CHARTS", CHARTS[:1])
    assert "<svg" in page.render(read_run(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("metrics.jsonl", '{"step": 1, "critic/score/mean": "high"}\n', "critic/score/mean is 'high'"),
        ("metrics.jsonl", '{"step": NaN}\n', "record 1 is no step's metrics"),
        ("metrics.jsonl", '{"score": 1.0}\n', "record 1 is no step's metrics"),
        ("restarts.jsonl", '{"cause": "x"}\n', "restarts.jsonl, line 1 is no record"),
        ("changes.jsonl", '{"step": 1, "changes": [{"key": "data.seed"}]}\n', "changes.jsonl, line 1 is no record"),
        ("val_generations/step_0.jsonl", "[1]\n", "step_0.jsonl, line 1 is no record"),
        ("data/data_report.json", "{", "data_report.json is not JSON"),
        ("data/data_report.json", '{"skipped": [{}]}', "data_report.json is no data report"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, told: str
) -> None:
    write_run(tmp_path, 2)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert told in capsys.readouterr().out


def test_transcripts_of_any_form_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    rows = [{"prompt": [{"role": "user"}], "response": "\ud800", "score": NAN}, {"prompt": None}]
    for step in (0, 2):
        file = tmp_path / "val_generations" / f"step_{step}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prom')
    (tmp_path / "val_generations" / "step_4.jsonl").write_text("")
    assert "score nan" in page._transcripts(read_run(tmp_path)).encode().decode()


def test_a_problem_with_several_answers_is_shown_once(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    answers = ("first", "other")
    rows = [{"prompt": prompt, "response": answer} for prompt in ("2 + 2", "3 + 3") for answer in answers]
    for step in (0, 2):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "val_generations" / f"step_{step}.jsonl").write_text(text)
    shown = page._transcripts(read_run(tmp_path))
    assert [shown.count(part) for part in ("2 + 2", "3 + 3", *answers)] == [1, 1, 4, 0]
