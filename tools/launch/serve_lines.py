"""The last lines of a run: a command that serves the trained model, and one that asks it a held-out problem."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from recipes.common.recipe import ROOT
from tools.launch.job import Job
from tools.launch.stages import export_dir
from verl.trainer.config.data import file_list
from verl.utils.net_utils import LOOPBACK
from verl.utils.parquet import chat_message, schema_problems

PORT = 8000


def serve_lines(job: Job) -> list[str]:
    """Both commands, each below what it does, for a shell in any directory; none where there is no exported model."""
    model = export_dir(job)
    if not (model / "config.json").is_file():
        return []
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT)]
    serve = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-P", *server]
    body = {"messages": _messages(job), "max_tokens": job.config.data.max_response_length, "temperature": 0}
    address = f"http://{LOOPBACK}:{PORT}/v1/chat/completions"
    ask = ["curl", address, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return ["Serve the trained model:", shlex.join(serve), "Ask it, from another terminal:", shlex.join(ask)]


def _messages(job: Job) -> list[dict[str, Any]]:
    """The first held-out problem as the run asks it; a sum where no such file is there."""
    data = job.config.data
    for path in file_list(data.val_files)[:1]:
        if not schema_problems(path, data.prompt_key):
            rows = next(pq.ParquetFile(Path(path).expanduser()).iter_batches(1, columns=[data.prompt_key]))
            return [chat_message(message) for message in rows.to_pylist()[0][data.prompt_key]]
    return [{"role": "user", "content": "1 + 2 = ?"}]
