"""A checkpoint with a tokenizer and a chat template, served: in this process, or by the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.vllm.tiny import write_checkpoint

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BYTES = 256


def write_served_checkpoint(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> str:
    """A tiny random model over bytes: tokens 0 and 1 begin and end, the others are one byte each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1} | {char: 2 + index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    checkpoint = write_checkpoint(path, vocab_size=2 + BYTES)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=chat_template
    ).save_pretrained(path)
    return checkpoint


MODULE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


@contextmanager
def server_process(
    checkpoint: str, port: int = 0, *options: str, command: Sequence[str] = MODULE, lines: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command as a user starts it: (process, its port) once it listens. Killed at the end if it still lives.

    `lines` gets what it logs until then.
    """
    words = [*command, checkpoint, "--port", str(port), *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        assert process.stderr is not None
        lines = [] if lines is None else lines
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(lines))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would stop the server
        yield process, int(found.group(1))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(10)


def wait_until(is_so: object, timeout_s: float = 10.0) -> None:
    """Wait for a callable to say yes."""
    assert callable(is_so)
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.02)
