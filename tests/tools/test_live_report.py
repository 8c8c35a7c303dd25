"""The live page of a run: what it answers, to whom, and what a real browser makes of it and of the final report."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.recipes.test_report import EVIL, write_run
from tools.report import live
from tools.report.__main__ import main

LOCAL = "127.0.0.1"


@contextmanager
def served(run_dir: Path) -> Iterator[int]:
    with socket.create_server((LOCAL, 0)) as listener:
        server = live.server(run_dir, 0)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(LOCAL, port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


def state(port: int, known: str = "") -> dict[str, str]:
    found: dict[str, str] = json.loads(ask(port, f"/state.json?known={known}")[2])
    return found


def write_samples(run_dir: Path, step: int, responses: dict[str, float]) -> None:
    (run_dir / "reward_ledger").mkdir(exist_ok=True)
    prompt = "<|im_start|>user\nTwo plus two?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n"
    record = {"uid": "a", "prompt": f"{prompt}What is {step} + 1?<|im_end|>\n<|im_start|>assistant\n"}
    lines = (
        json.dumps({**record, "response": text, "score": score, "parts": {"score": score}}) + "\n"
        for text, score in responses.items()
    )
    (run_dir / "reward_ledger" / f"step_{step}.jsonl").write_text("".join(lines))


def test_page_has_curves_and_samples_and_no_html_of_a_model(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_samples(tmp_path, 20, {"in between": 0.5, f"best {EVIL}": 1.0, "worst": 0.0})
    with served(tmp_path) as port:
        status, headers, page = ask(port, "/")
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';") and "script-src 'unsafe" not in policy
        assert re.findall("<script[^>]*>", page) == ['<script src="live.js">'] and "<img" not in page
        for title in ("Reward of training samples", "Validation on held-out", "Response length", "Time of a step"):
            assert f">{title}" in page
        assert page.count("&lt;script&gt;alert(") == 2, "of step 0, and the best of step 20"
        assert "Samples of step 20" in page and "What is 20 + 1?</b>" in page and "in between" not in page
        assert page.index("<pre>worst") < page.index("<pre>best ")
        script = ask(port, "/live.js")
        assert script[0] == 200 and script[1]["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    "host", ["evil.example", f"{LOCAL}.evil.example:80", "localhost.evil.example", "", "www.localhost"]
)
def test_another_name_that_leads_here_is_refused(tmp_path: Path, host: str) -> None:
    write_run(tmp_path, 1)
    with served(tmp_path) as port:
        for path in ("/", "/state.json"):
            status, _, text = ask(port, path, Host=host)
            assert status == 400 and "curve" not in text


def test_what_else_is_answered(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with served(tmp_path) as port:
        for host in (f"localhost:{port}", LOCAL, "localhost:9000"):  # one forwarded by ssh, too
            assert ask(port, "/state.json", Host=host)[0] == 200
        for path in ("/metrics.jsonl", "/../metrics.jsonl", "//live.js/", "http://evil.example/"):
            assert ask(port, path)[0] in (404, 400), path
        for method in ("POST", "PUT", "DELETE"):
            assert ask(port, "/", method)[0] == 405
        with socket.create_connection((LOCAL, port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert b" 400 " in client.recv(100)


def test_a_run_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From no directory to a step, half a line, a file that is damaged and mended; what is known is not sent again."""
    monkeypatch.setattr(live, "SHARE", 1e9)
    run_dir = tmp_path / "run"
    with served(run_dir) as port:
        assert state(port) == {"status": live.WAITING, "key": ""} and live.WAITING in ask(port, "/")[2]
        write_run(run_dir, 1)
        first = state(port)
        assert "training steps</span><b>1</b>" in first["body"] and "The last step was written " in first["status"]
        again = state(port, first["key"])
        assert "body" not in again and again["key"] == first["key"]
        metrics = run_dir / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + '{"step": 2, "critic/score/mean": 0.75')
        half = state(port, first["key"])
        assert "training steps</span><b>1</b>" in half["body"]
        metrics.write_text(metrics.read_text() + "}\n")
        assert "training steps</span><b>2</b>" in state(port, half["key"])["body"]
        metrics.write_text(metrics.read_text() + "x\n{}\n")
        damaged = state(port)
        assert "metrics.jsonl, line 4 is not JSON" in damaged["status"] and "<b>2</b>" in damaged["body"]
        metrics.write_text('{"step": 1, "critic/score/mean": 0.5}\n')
        assert "training steps</span><b>1</b>" in state(port)["body"], "a resumed run has removed a step"


def test_it_draws_for_a_small_share_of_the_time_and_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(live, "live_body", lambda run, *samples: str(drawn.append(len(run.metrics))))
    clock = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    spent = iter([0.0, 0.5, 0.5, 1.0])
    monkeypatch.setattr(live.time, "process_time", lambda: next(spent))
    run = live.LiveRun(tmp_path)
    for num_steps, now in ((1, 100.0), (1, 120.0), (2, 105.0), (3, 109.9), (4, 110.0)):
        write_run(tmp_path, num_steps)
        if (num_steps, now) != (1, 120.0):
            clock[0] = now
        run.state()
    assert drawn == [2, 5], "half a second is a twentieth of ten"


def test_a_slow_client_is_hung_up_on_and_many_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 1)
    monkeypatch.setattr(live, "CONNECTION_S", 3.0)
    monkeypatch.setattr(live, "MOST", 2)
    with served(tmp_path) as port:
        slow = [socket.create_connection((LOCAL, port), timeout=30) for _ in range(2)]
        for client in slow:
            client.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert ask(port, "/")[0] == 503
        for client in slow:
            assert client.recv(1) == b""
            client.close()
        assert ask(port, "/live.js")[0] == 200, "there is room again"


def test_a_port_in_use_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--run-dir", str(tmp_path), "--serve", str(port)]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert f"--serve {port} cannot be used" in text and "set --serve to a free port" in text


def chromium() -> str:
    """The browser that the tests look with; a skip where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is in PATH, and CHROMIUM names none")
    return found


def browser_dom(address: str, profile: Path) -> str:
    """The page as the browser has it once its scripts have run for five seconds of their time."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}")
    command = [chromium(), *options, "--virtual-time-budget=5000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.parametrize("page", ["live", "report"])
def test_in_a_browser(tmp_path: Path, page: str) -> None:
    chromium()
    run_dir = tmp_path / "run"
    write_run(run_dir)
    write_samples(run_dir, 20, {f"best {EVIL}": 1.0, "worst": 0.0})
    if page == "report":
        assert main(["--run-dir", str(run_dir)]) == 0
        dom = browser_dom((run_dir / "report.html").as_uri(), tmp_path / "profile")
    else:
        with served(run_dir) as port:
            dom = browser_dom(f"http://{LOCAL}:{port}/", tmp_path / "profile")
        assert "This page looks for more by itself." in dom and "<pre>worst" in dom
    assert len(re.findall("<svg", dom)) == (4 if page == "live" else 8) and ">Reward of training samples</text>" in dom
    assert dom.count("&lt;script&gt;alert(") == (2 if page == "live" else 1)
    assert "<img" not in dom and dom.count("<script") == (1 if page == "live" else 0)
    assert "step 0</span>" in dom and "step 20</span>" in dom


def test_a_page_that_is_open_takes_new_steps_by_itself(tmp_path: Path) -> None:
    """The browser gets a page of one step, and the script asks for the rest."""
    chromium()
    run_dir = tmp_path / "run"
    write_run(run_dir, 1)

    class Growing(live.LiveRun):
        def state(self, known: str | None = None) -> dict[str, str]:
            found = super().state(known)
            if known is None:  # the page itself; its script knows what is on it
                write_run(run_dir, 3)
            self._not_before = 0.0
            return found

    original, live.LiveRun = live.LiveRun, Growing  # type: ignore[misc]
    try:
        with served(run_dir) as port:
            dom = browser_dom(f"http://{LOCAL}:{port}/", tmp_path / "profile")
    finally:
        live.LiveRun = original  # type: ignore[misc]
    assert "training steps</span><b>3</b>" in dom
