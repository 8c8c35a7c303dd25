"""Commands stop when they are told to, whatever Python was doing at that moment."""

from __future__ import annotations

import argparse
import signal
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_llm.cli_io import atomic_directory, progress, run_cli

INTERRUPTED = 130


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """A job in the background may have been started with SIGINT ignored, which commands leave so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Thing:
    """What a weak reference can point to."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_callback_of_a_weak_reference_stops_the_command(number: signal.Signals) -> None:
    went_on = []

    def body(arguments: argparse.Namespace) -> None:
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
        with progress("work", total_bytes=2) as advance:
            del thing
            went_on.append(reference() is None)  # what the handler raised did not reach us
            advance(1)
            went_on.append(True)

    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert run_cli(argparse.ArgumentParser(), body, []) == INTERRUPTED
    assert went_on == [True]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_earlier_stop_does_not_stop_the_next_command() -> None:
    def stopped(arguments: argparse.Namespace) -> None:
        signal.raise_signal(signal.SIGTERM)

    def undisturbed(arguments: argparse.Namespace) -> None:
        with progress("work", total_bytes=1) as advance:
            advance(1)

    assert run_cli(argparse.ArgumentParser(), stopped, []) == INTERRUPTED
    assert run_cli(argparse.ArgumentParser(), undisturbed, []) == 0


@pytest.mark.parametrize(("line_interval_s", "wanted"), [(60.0, []), (0.0, ["50% of 2.0 GB", "100% of 2.0 GB"])])
def test_a_log_gets_lines_in_place_of_a_bar(
    capsys: pytest.CaptureFixture[str], line_interval_s: float, wanted: list[str]
) -> None:
    with progress("cast, 2 files", 2 * 10**9, line_interval_s) as advance:
        advance(10**9)
        advance(10**9)
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("cast, 2 files: ").partition(",")[0] for line in lines] == wanted


def test_what_a_killed_run_was_replacing_gets_its_name_back(tmp_path: Path) -> None:
    """A kill between the two renames leaves no directory of the name; the process of this id cannot exist."""
    target = tmp_path / "out"
    old, new = (tmp_path / f"out.tmp-{socket.gethostname()}-{2**22 + 1}{end}" for end in (".old", ""))
    for path in (old, new):
        path.mkdir()
        (path / "weights").write_text(path.suffix)
    with pytest.raises(RuntimeError), atomic_directory(target):
        raise RuntimeError
    assert (target / "weights").read_text() == ".old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
