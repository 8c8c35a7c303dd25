"""``python -m tools.download``: what arrives from a hub on this machine, what is refused, what a cut download keeps."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT
from tools import download
from tools.download_sources import SOURCES

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROBLEMS = json.dumps([{"problem": "1 + 1?", "answer": "2", "solution": ""}]).encode()


@contextmanager
def hub(files: dict[str, dict[str, bytes]], claimed: dict[str, int] | None = None) -> Iterator[str]:
    """The part of Hugging Face's HTTP interface that a download uses; repositories as ``datasets/org/name``, by file.

    ``claimed`` overrides the sizes that the hub gives for files.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0].lstrip("/")
            status, body, headers = self._find(path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _find(self, path: str) -> tuple[int, bytes, dict[str, str]]:
            for repo, content in files.items():
                if path.startswith(f"api/{repo}/tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(body), "oid": "0"} for name, body in content.items()
                    ]
                    return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
                if path == f"api/{repo}" or path.startswith(f"api/{repo}/revision/"):
                    sizes = {name: len(body) for name, body in content.items()} | (claimed or {})
                    siblings = [{"rfilename": name, "size": sizes[name]} for name in content]
                    answer = {"id": repo.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}
                    return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
                name = path.removeprefix(f"{repo}/resolve/{COMMIT}/")
                if name in content:
                    digest = hashlib.sha256(content[name]).hexdigest()
                    return 200, content[name], {"ETag": f'"{digest}"'}
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def fetch(endpoint: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "tools.download", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_data_set_arrives_with_the_line_that_uses_it(tmp_path: Path) -> None:
    repo = f"datasets/{SOURCES['deepscaler'].huggingface}"
    with hub({repo: {"deepscaler.json": PROBLEMS, "figures/large.png": b"not wanted"}}) as endpoint:
        done = fetch(endpoint, tmp_path, "deepscaler", "--to", str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data" / "deepscaler.json").read_bytes() == PROBLEMS
    assert not (tmp_path / "data" / "figures").exists()
    assert f"use it: JSON_PATH={tmp_path}/data/deepscaler.json bash recipes/r1_zero/" in done.stdout


def test_a_model_without_weights_and_a_disk_without_room(tmp_path: Path) -> None:
    repo = f"models/{SOURCES['moonlight'].huggingface}"
    content = {"config.json": b"{}", "tiktoken.model": b"AA== 0\n", "model-00001.safetensors": b"weights"}
    files = {repo: content, repo.removeprefix("models/"): content}  # models' files have no prefix
    with hub(files, claimed={"model-00001.safetensors": 10**18}) as endpoint:
        target = tmp_path / "model"
        done = fetch(endpoint, tmp_path, "moonlight", "--to", str(target), "--no-weights")
        assert done.returncode == 0, done.stderr
        assert {path.name for path in target.iterdir() if path.is_file()} == {"config.json", "tiktoken.model"}
        assert f"before that: {target} has no tokenizer.json, and its tokenizer (tiktoken.model) needs" in done.stdout
        done = fetch(endpoint, tmp_path, "moonlight", "--to", str(target))
    assert done.returncode == download.EXIT_FAILED
    assert "1000000000.0 GB are to come and" in done.stderr and "Traceback" not in done.stderr


def test_a_hub_that_does_not_have_it_is_one_line(tmp_path: Path) -> None:
    with hub({}) as endpoint:
        done = fetch(endpoint, tmp_path, "gsm8k", "--to", str(tmp_path / "data"))
    assert done.returncode == download.EXIT_FAILED
    assert done.stderr.startswith("error: openai/gsm8k from huggingface: ") and "Traceback" not in done.stderr


def test_without_a_network_the_message_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    done = fetch("http://127.0.0.1:9", tmp_path, "gsm8k", "--to", str(tmp_path / "data"))
    assert done.returncode == download.EXIT_FAILED
    assert done.stderr.startswith("error: openai/gsm8k from huggingface: no connection (")
    assert "HF_ENDPOINT names a mirror" in done.stderr and "Traceback" not in done.stderr


def test_bad_requests_are_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert download.main(["gsm9k", "--to", str(tmp_path)]) == download.EXIT_BAD_INPUT
    assert "'gsm9k' is not one of deepscaler, " in capsys.readouterr().err
    assert download.main(["gsm8k"]) == download.EXIT_BAD_INPUT
    assert "--to DIR is missing" in capsys.readouterr().err
    arguments = ["aime-2024", "--to", str(tmp_path), "--source", "modelscope", "--no-weights"]
    assert download.main(arguments) == download.EXIT_BAD_INPUT
    message = capsys.readouterr().err
    assert "aime-2024 is not on ModelScope" in message and "--no-weights is for models" in message
    assert download.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and source.huggingface in listed for name, source in SOURCES.items())
