"""The process that writes one rank's part of an asynchronous checkpoint; it outlives the process that started it.

A process, not a thread: it finishes the checkpoint when the training process is killed, crashes or raises; it shares no
interpreter lock with the step; and when it ends, all memory of the snapshot is free. Started anew for each save with
``exec``, because to fork a process that has device contexts, communication threads or Ray's is not safe. It is in a
session of its own and nobody's child, so that neither a signal to the job's process group nor Ray, which ends the
children of a worker with it, reaches it. It sees no device.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys

from megatron.core.dist_checkpointing.snapshot import Snapshot, read_snapshot
from megatron.core.dist_checkpointing.writing import RankJob, complete, tell_failure, write_rank

_DONE = "done"
# The first process tells the pid of the second, which is the writer, and ends.
_START = """import os
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
from {module} import main
main({address!r})
"""


class BackgroundWrite:
    """A running write of this rank's part, seen from the training process. The snapshot is the writer's from now on."""

    def __init__(self, job: RankJob, snapshot: Snapshot) -> None:
        self.job = job
        no_device = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        try:
            self._starter = subprocess.Popen(
                [sys.executable, "-c", _START.format(module=__name__, address=snapshot.address)],
                pass_fds=[snapshot.handle],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | no_device | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            snapshot.close()
        assert self._starter.stdout is not None
        self._reports = self._starter.stdout
        self.pid = int(self._reports.readline() or -1)
        self._starter.wait()
        self._said = b""
        self._failure: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether it still writes (or, on the completing rank, waits for the others)."""
        while not self._reports.closed and select.select([self._reports], [], [], 0)[0]:
            self._read()
        return not self._reports.closed

    def result(self) -> None:
        """Wait for its end; ``OSError`` when it did not succeed, also on further calls."""
        while not self._reports.closed:
            self._read()
        if self._failure is not None:
            raise OSError(f"checkpoint {self.job.final}: {self._failure}")

    def _read(self) -> None:
        """Take what the writer says; its end closes the pipe, whatever it died of."""
        text = os.read(self._reports.fileno(), 1 << 16)
        self._said += text
        if text:
            return
        self._reports.close()
        said = self._said.decode().strip()
        if said != _DONE:
            self._failure = said or "its writer was killed"
            tell_failure(self.job, self._failure)


def main(address: str) -> None:
    """Write what the snapshot holds; on failure the text goes to the training process, if it is still there."""
    reports = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the log
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
            tell_failure(job, text)
        else:
            shutil.rmtree(job.partial, ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):  # the training process is gone
        os.write(reports, text.encode())
