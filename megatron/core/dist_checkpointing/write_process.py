"""The process that writes one rank's part of an asynchronous checkpoint; it outlives the process that started it.

A process, not a thread: it finishes the checkpoint when the training process is killed, crashes or raises; it shares no
interpreter lock with the step; and when it ends, all memory of the snapshot is free. Started anew for each save with
``exec``, because to fork a process that has device contexts, communication threads or Ray's is not safe. It sees no
device.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

from megatron.core.dist_checkpointing.snapshot import Snapshot, read_snapshot
from megatron.core.dist_checkpointing.writing import RankJob, complete, tell_failure, write_rank


class BackgroundWrite:
    """A running write of this rank's part, seen from the training process."""

    def __init__(self, job: RankJob, snapshot: Snapshot) -> None:
        self.job = job
        no_device = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({snapshot.address!r})"],
            pass_fds=[snapshot.handle],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the training job's group (Ctrl-C) are not for it
            env=os.environ | no_device | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        snapshot.close()
        self._failure: str | None = None

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it still writes (or, on the completing rank, waits for the others)."""
        return self._process.poll() is None

    def result(self) -> None:
        """Wait for its end; ``OSError`` when it did not succeed, also on further calls."""
        if self._process.stdout is not None and not self._process.stdout.closed:
            text, _ = self._process.communicate()
            code = self._process.returncode
            if code:
                self._failure = text.strip() or f"its writer ended with {f'signal {-code}' if code < 0 else code}"
                tell_failure(self.job, self._failure)
        if self._failure is not None:
            raise OSError(f"checkpoint {self.job.final}: {self._failure}")


def main(address: str) -> None:
    """Write what the snapshot holds; on failure the text goes to the training process, if it is still there."""
    os.nice(5)
    tensors, job = read_snapshot(address)
    try:
        write_rank(job, tensors, copy_ahead_bytes=0)
        del tensors
        if job.completion is not None:
            complete(job)
    except Exception as error:
        text = str(error) if isinstance(error, OSError) else repr(error)
        print(f"rank {job.rank}: checkpoint {job.final}: {text}", file=sys.stderr)
        if job.completion is None:
            tell_failure(job, text)
        else:
            shutil.rmtree(job.partial, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            print(text, flush=True)
        os._exit(1)
