"""The process that writes one rank's part of an asynchronous checkpoint; it outlives the process that started it.

It is a process, not a thread: it finishes the checkpoint even if the training process is killed, crashes or raises; it
does not share the interpreter lock with the step; and when it exits, all memory of the snapshot is freed. Each save
starts a new one with ``exec``, because it is not safe to fork a process that has device contexts or threads. It has a
session of its own and is reparented, so that it survives a signal to the job's process group, and Ray, which kills the
children of a worker together with it. It sees no device.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys

from megatron.core.dist_checkpointing.snapshot import Snapshot, read_snapshot
from megatron.core.dist_checkpointing.writer import RankJob, complete, report_failure, write_rank

_DONE = "done"
# The first process prints the pid of the second, which is the writer, and exits.
_START = """import os
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
from {module} import main
main({address!r})
"""


class BackgroundWrite:
    """The training process's handle on the running write of this rank's part; the writer takes over the snapshot."""

    def __init__(self, job: RankJob, snapshot: Snapshot) -> None:
        self.job = job
        no_device = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        try:
            self._starter = subprocess.Popen(
                [sys.executable, "-c", _START.format(module=__name__, address=snapshot.address)],
                pass_fds=[snapshot.handle],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,  # else readline would take what the writer reports next out of the pipe
                start_new_session=True,
                env=os.environ | no_device | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            snapshot.close()
        assert self._starter.stdout is not None
        self._reports = self._starter.stdout
        self.pid = int(self._reports.readline() or -1)
        self._starter.wait()
        self._output = b""
        self._failure: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether the writer still writes (or, on the completing rank, waits for the others)."""
        while not self._reports.closed and select.select([self._reports], [], [], 0)[0]:
            self._read()
        return not self._reports.closed

    def result(self) -> None:
        """Wait until the writer exits; ``OSError`` if it failed, also on further calls."""
        while not self._reports.closed:
            self._read()
        if self._failure is not None:
            raise OSError(f"checkpoint {self.job.final}: {self._failure}")

    def _read(self) -> None:
        """Read the writer's output; when the writer exits, for whatever reason, the pipe is closed."""
        text = os.read(self._reports.fileno(), 1 << 16)
        self._output += text
        if text:
            return
        self._reports.close()
        output = self._output.decode().strip()
        if output != _DONE:
            self._failure = output or "its writer was killed"
            report_failure(self.job, self._failure)


def main(address: str) -> None:
    """Write the snapshot's tensors; an error's text is sent to the training process, if it is still running."""
    reports = os.dup(1)
    os.dup2(2, 1)  # the output of libraries goes to the log
    os.nice(5)
    tensors, job = read_snapshot(address)
    text = _DONE
    try:
        write_rank(job, tensors, copy_ahead_bytes=0)
        del tensors
        if job.completion is not None:
            complete(job)
    except Exception as error:
        text = str(error) if isinstance(error, OSError) else repr(error)
        print(f"rank {job.rank}: checkpoint {job.final}: {text}", file=sys.stderr)
        if job.completion is None:
            report_failure(job, text)
        else:
            shutil.rmtree(job.partial, ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):  # the training process has exited
        os.write(reports, text.encode())
