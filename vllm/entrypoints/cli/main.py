"""The command `vllm`: `vllm serve DIR` starts the HTTP server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["serve"]:
        from vllm.entrypoints.openai.api_server import main as serve  # the web server is not needed without it

        return serve(words[1:], prog="vllm serve")
    parser = argparse.ArgumentParser(prog="vllm", description="The rollout engine, under vLLM's name.")
    parser.add_argument(
        "command", choices=["serve"], help="serve a model over HTTP; vllm serve --help lists the options"
    )
    parser.add_argument("-v", "--version", action="version", version=f"{__version__} (the version of vLLM's interface)")
    parser.parse_args(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
