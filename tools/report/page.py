"""``report.html``: the run on one page that needs nothing beside it; everything a model wrote is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.report.curves import CHARTS, LIVE_CHARTS, SPECIAL_CHARTS, Chart, as_svg
from tools.report.learning import signs_of, verdict
from tools.report.phases import LABELS, STEP, phases
from tools.report.run_data import RunData, is_finite

MAX_TRANSCRIPTS = 12
MAX_CHARS = 2000
MAX_GROUPS = 4
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Where a user's turn begins and ends in a prompt, in the templates of DeepSeek, of Qwen and others, and of Llama 3.
_USER_TURNS = (
    ("<｜User｜>", "<｜Assistant｜>"),
    ("<|im_start|>user\n", "<|im_end|>"),
    ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
)


def page_style() -> str:
    """The style sheet of the pages."""
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def render(run: RunData) -> str:
    body = "".join(
        [
            _head(run),
            _learning(run),
            _curves(run, (*CHARTS, *_special_charts(run))),
            _phases(run),
            _transcripts(run),
            _data(run),
            _changes(run),
            _restarts(run),
            _last_step(run),
        ]
    )
    return document(f"{run.run_dir.name}: training report", body, POLICY)


def document(title: str, body: str, policy: str) -> str:
    """A whole page; ``policy``: what its browser may load and run."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{page_style()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def live_body(run: RunData, step: int, samples: Sequence[dict[str, Any]]) -> str:
    """What the live page shows; ``samples``: some of training step ``step``, as the reward ledger has them."""
    return _head(run) + _curves(run, LIVE_CHARTS) + _transcripts(run) + _samples(step, samples)


def _special_charts(run: RunData) -> list[Chart]:
    return [chart for chart in SPECIAL_CHARTS if any(map(run.series, chart.curves.values()))]


def _head(run: RunData) -> str:
    cells = []
    if scores := [value for _, value in run.series("val/score")]:
        cells.append(("validation score", f"{scores[0]:.2f} → {scores[-1]:.2f}"))
    if score := run.series("critic/score/mean"):
        cells.append(("training score", f"{score[0][1]:.2f} → {score[-1][1]:.2f}"))
    cells += [("training steps", str(int(run.metrics[-1]["step"]))), ("time in the loop", duration(run.seconds()))]
    for title, metric, form in (
        ("seconds of the last step", "timing_s/step", "{:,.1f}"),
        ("tokens per s and device", "perf/throughput", "{:,.0f}"),
        ("mean response length", "response_length/mean", "{:.1f}"),
    ):
        if series := run.series(metric):
            cells.append((title, form.format(series[-1][1])))
    if gaps := [value for _, value in run.series("training/rollout_probs_diff_max")]:
        cells.append(("largest trainer/rollout gap", f"{max(gaps):.1e}"))
    where = html.escape(str(run.run_dir))
    return f'<h1>{html.escape(run.run_dir.name)}</h1><div class="muted path">{where}</div>{tiles(cells)}'


def _learning(run: RunData) -> str:
    """Whether it has learned, and every sign that it did not with what to change."""
    table = _table(rows, "sign", "steps", "what to change") if (rows := signs_of(run)) else ""
    return f'<h2>Learning</h2><div class="card"><div>{_text(verdict(run))}</div>{table}</div>'


def tiles(cells: Sequence[tuple[str, str]]) -> str:
    """Facts in rows of four, or of two on a narrow page; the first are wider where a last row would not be full."""
    shown = ""
    for number, (title, value) in enumerate(cells):
        wide = " wide4" if number < -len(cells) % 4 else ""
        wide += " wide2" if number < len(cells) % 2 else ""
        shown += f'<div class="tile{wide}"><span class="muted small">{title}</span><b>{value}</b></div>'
    return f'<div class="tiles">{shown}</div>'


def _curves(run: RunData, charts: Sequence[Chart]) -> str:
    figures = "".join(f'<div class="card">{as_svg(run, chart)}</div>' for chart in charts)
    dotted = '<p class="muted small">Dotted lines: the run was resumed and learns from something else.</p>'
    return f'<h2>Curves</h2>{dotted if run.changes else ""}<div class="charts">{figures}</div>'


def _phases(run: RunData) -> str:
    """A bar for each phase where it is in a mean step, below that of the phase which contains it."""
    shown = phases(run)
    if not shown:
        return ""
    longest = max(*(phase.start_s + phase.seconds for phase in shown), 1e-9)
    num_steps = max(phase.num_steps for phase in shown)
    rows = ""
    for phase in shown:
        name = html.escape(LABELS.get(phase.name, phase.name))
        often = f'<span class="muted small"> in {phase.num_steps} steps</span>' if phase.num_steps < num_steps else ""
        kind = f"depth{phase.depth}" + (" beside" if phase.depth == 0 and phase.name != STEP else "")
        place = f"margin-left:{100 * phase.start_s / longest:.2f}%;width:{100 * phase.seconds / longest:.2f}%"
        rows += (
            f'<tr><td class="{kind}">{name}{often}</td><td class="num">{phase.seconds:.2f} s</td>'
            f'<td class="wide"><div class="bar {kind}" style="{place}"></div></td></tr>'
        )
    return (
        '<h2>Time of a step</h2><div class="card"><div class="muted small">Means over all training steps; a phase is '
        "below the one that contains it. Grey is what is not in a step: means over the times that it happened. Graders "
        f'run beside the log-probs; reward is the wait for them.</div><table class="phases">{rows}</table></div>'
    )


def _transcripts(run: RunData) -> str:
    """Answers to the same problems at the first and at the last validation."""
    if not run.generations:
        return ""
    first, last = min(run.generations), max(run.generations)
    before, after = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for step, found in ((first, before), (last, after)):
        for row in run.generations[step]:
            found.setdefault(str(row.get("prompt")), row)  # the first of several answers
    cards = []
    for prompt, row in list(after.items())[:MAX_TRANSCRIPTS]:
        sides = _answer(f"step {last}", row)
        if first != last and prompt in before:
            sides = _answer(f"step {first}", before[prompt]) + sides
        cards.append(_card(row, sides))
    return f"<h2>Transcripts</h2>{''.join(cards)}"


def _samples(step: int, samples: Sequence[dict[str, Any]]) -> str:
    """The answers with the lowest and the highest score to some prompts of a training step."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in samples:
        if "response" in row and is_finite(row.get("score")):  # a ledger may hold digests instead
            groups.setdefault(str(row.get("uid")), []).append(row)
    cards = []
    for rows in list(groups.values())[:MAX_GROUPS]:
        rows.sort(key=lambda row: row["score"])
        shown = [{"response": row["response"]} | row.get("parts", {}) for row in (rows[0], rows[-1])]
        sides = _answer("lowest score", shown[0]) + (_answer("highest score", shown[1]) if len(rows) > 1 else "")
        cards.append(_card(rows[0], sides))
    return f"<h2>Samples of step {step}</h2>{''.join(cards)}" if cards else ""


def _card(row: dict[str, Any], sides: str) -> str:
    return (
        f'<div class="card" style="margin-top:12px"><div><b>{_question(row)}</b> '
        f'<span class="muted small">truth: {_text(row.get("ground_truth"))}</span></div>'
        f'<div class="pair">{sides}</div></div>'
    )


def _answer(label: str, row: dict[str, Any]) -> str:
    known = {"step", "prompt", "response", "ground_truth"}
    failures = ("ungraded", "timeout", "grader_error")  # shown where there was one
    badges = "".join(
        f' <span class="badge{" good" if value >= 0.99 else ""}">{html.escape(name)} {value:.2f}</span>'
        for name, value in row.items()
        if name not in known and isinstance(value, (int, float)) and not (name in failures and value == 0)
    )
    return f'<div><span class="muted small">{label}</span>{badges}<pre>{_text(row.get("response"))}</pre></div>'


def _question(row: dict[str, Any]) -> str:
    """The user's last turn in the prompt, when its template's marks are there."""
    prompt = str(row.get("prompt", ""))
    for begin, end in _USER_TURNS:
        if begin in prompt:
            prompt = prompt.rsplit(begin, 1)[1].split(end, 1)[0]
    return _text(prompt)


def _text(value: object) -> str:
    text = str(value).encode(errors="replace").decode()  # a file has no half of a surrogate pair
    return html.escape(text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …")


def _data(run: RunData) -> str:
    report = run.data_report
    if report is None:
        return ""
    skipped = "".join(f"<li>row {int(e['index'])}: {_text(e['reason'])}</li>" for e in report.get("skipped", []))
    skipped_rows, duplicates, over_long = (len(report.get(key, [])) for key in ("skipped", "duplicates", "over_long"))
    counts = (
        f"{report.get('rows_read')} rows read, {skipped_rows} skipped, {duplicates} duplicates removed, {over_long} "
        f"over-long filtered, {report.get('train_rows')} for training, {report.get('test_rows')} held out"
    )
    source = _text(report.get("json_path"))
    return f'<h2>Data</h2><div class="card path">{source}: {html.escape(counts)}<ul>{skipped}</ul></div>'


def _changes(run: RunData) -> str:
    """What a resumed run learned from instead; the curves have a dotted line there."""
    rows = [
        (int(change["step"]), entry["key"], json.dumps(entry["was"]), json.dumps(entry["now"]))
        for change in run.changes
        for entry in change["changes"]
    ]
    if not rows:
        return ""
    note = '<div class="muted small">the dotted lines of the curves</div>'
    title = "Resumed with another reward, data set or algorithm"
    return f'<h2>{title}</h2><div class="card">{note}{_table(rows, "from step", "key", "was", "is")}</div>'


def _restarts(run: RunData) -> str:
    if not run.restarts:
        return ""
    rows = [[restart.get(key) for key in ("step", "from_step", "cause")] for restart in run.restarts]
    table = _table(rows, "failed in step", "went back to", "cause")
    return f'<h2>Restarts of workers</h2><div class="card">{table}</div>'


def _table(rows: Iterable[Iterable[object]], *columns: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _last_step(run: RunData) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(json.dumps(value))}</td></tr>"
        for name, value in sorted(run.metrics[-1].items())
    )
    return f'<h2>Last step</h2><details class="card"><summary>all metrics</summary><table>{rows}</table></details>'


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
