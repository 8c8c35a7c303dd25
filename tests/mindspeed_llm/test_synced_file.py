"""A file written by a thread has the bytes that were written, in whatever order, and raises what the thread met."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from pathlib import Path

import pytest

from mindspeed_llm.conversion.synced_file import WAITING_BYTES, SyncedFile

LENGTHS = (0, 4, 100, 4096, 5000, 1 << 20, 5 << 20)


@pytest.mark.parametrize("has_direct", [True, False])
def test_bytes_are_where_they_were_put(has_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_direct:
        monkeypatch.delattr("os.O_DIRECT", raising=False)
    rng, noise, expected = random.Random(0), os.urandom(max(LENGTHS)), bytearray()
    with SyncedFile(tmp_path / "file") as stream:
        position = 0
        for _ in range(80):
            if rng.random() < 0.4:
                position = stream.seek(rng.randrange(len(expected) + 1))
            length = rng.choice(LENGTHS)
            assert stream.write(memoryview(noise)[:length]) == length
            expected[position : position + length] = noise[:length]
            position += length
            assert stream.tell() == position
        stream.sync()
        assert (tmp_path / "file").read_bytes() == expected


def test_a_full_disk_is_told_to_whoever_writes(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={WAITING_BYTES}", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk that is small can be mounted by root only")
    try:
        with pytest.raises(OSError) as raised, SyncedFile(tmp_path / "long") as stream:
            while stream.tell() < 8 * WAITING_BYTES:
                stream.write(bytes(1 << 20))
        assert raised.value.errno == errno.ENOSPC
        (tmp_path / "long").unlink()
        with pytest.raises(OSError) as raised, SyncedFile(tmp_path / "short") as stream:
            stream.write(bytes(WAITING_BYTES + 1))
            stream.sync()
        assert raised.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
