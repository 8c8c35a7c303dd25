"""Libraries are built once, by whichever compiler there is; a broken one is an error in time, and leaves nothing."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hf_formats.native_build import NativeBuild, compiler_of, has_program

LIBRARY = next((Path(torch.__file__).parent / "lib").glob("libc10.so*"))
COPY = f'for last; do :; done; cp "{LIBRARY}" "$last"'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder and a TMPDIR with a space and letters beyond ASCII."""
    folder, temporary = tmp_path / "実験 é", tmp_path / "tmp ü"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    return folder / "r1-zero-ascend" / "test"


def build(tmp_path: Path, script: str, limit_s: float = 20) -> NativeBuild:
    """A build by a compiler that is this shell script; its calls that compile or link go to a file."""
    compiler, source = tmp_path / "my cc", tmp_path / "é source.c"
    source.write_text("int one;")
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = -dumpfullversion ] && exit 0\necho "$@" >> "{tmp_path}/calls"\n{script}\n'
    )
    compiler.chmod(0o755)
    return NativeBuild(
        "tests", compiler_of("NO_SUCH_VARIABLE", str(compiler)), (), (source,), "test", "ADVICE", limit_s=limit_s
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_built_once_and_then_kept(tmp_path: Path, cache: Path) -> None:
    first = build(tmp_path, COPY)
    assert first.load() and first.path() == build(tmp_path, COPY).path()
    assert len((tmp_path / "calls").read_text().splitlines()) == 2  # compiled and linked
    assert names(cache) == ["building", first.path().name]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo too old >&2; exit 1", "cannot build .*ADVICE.*\n.*too old"),
        ("sleep 30", "has not built .* in 0.3 s and was ended; ADVICE"),
        ("sleep 30 & wait", "has not built .* in 0.3 s and was ended; ADVICE"),
        ('for last; do :; done; echo garbage > "$last"', "is no library .*ADVICE"),
        ('for last; do :; done; : > "$last"', "is no library .*ADVICE"),
        ("exit 0", "makes no file .*ADVICE"),
        ("kill -9 $$", "cannot build .*ADVICE"),
    ],
)
def test_a_broken_compiler_is_an_error_in_time_and_leaves_nothing(
    tmp_path: Path, cache: Path, script: str, text: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        build(tmp_path, script, limit_s=0.3 if "sleep" in script else 20).load()
    assert time.monotonic() - begin < 10
    assert names(cache) == ["building"]


def test_without_a_compiler_the_error_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="tests need a compiler, and 'no-such-cc' is not found: ADVICE"):
        NativeBuild("tests", ("no-such-cc",), (), (tmp_path,), "test", "ADVICE").load()


def test_a_damaged_library_in_the_cache_is_made_again(tmp_path: Path) -> None:
    path = build(tmp_path, COPY).path()
    path.write_bytes(b"no library")
    assert build(tmp_path, COPY).load()
    assert path.stat().st_size == LIBRARY.stat().st_size


def test_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    one = build(tmp_path, f"sleep 0.2; {COPY}")
    ranks = [multiprocessing.get_context("fork").Process(target=one.path) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_a_builder_that_is_killed_leaves_no_lock_and_no_half_of_a_file(tmp_path: Path, cache: Path) -> None:
    rank = multiprocessing.get_context("fork").Process(target=build(tmp_path, "sleep 2").path)
    rank.start()
    while not (tmp_path / "calls").exists():
        time.sleep(0.01)
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    rank.join(60)
    assert build(tmp_path, COPY).load()
    assert len(names(cache)) == 2


def test_a_lock_that_is_never_given_back_does_not_hold_up_a_start(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    with (cache / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert build(tmp_path, COPY, limit_s=0.5).load()


def test_compilers_are_programs_or_programs_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "with space" / "cc"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for given, expected in (
        (str(program), (str(program),)),
        ("sh -e", ("sh", "-e")),
        ("", ("cc",)),
        ("'open", ("'open",)),
    ):
        monkeypatch.setenv("CC", given)
        assert compiler_of("CC", "cc") == expected
    assert has_program(("sh", "-e")) and not has_program(("no-such-cc",))
