"""Wait until Ray's head knows all nodes of the run; say which ones it misses when the time is over."""

from __future__ import annotations

import argparse
import logging
import sys
import time


def main() -> int:
    """Exit status 0 when all addresses have joined."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of Ray's head")
    parser.add_argument("--expect", required=True, help="addresses of the nodes, separated by commas")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    args = parser.parse_args()
    import ray
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    expected = set(args.expect.split(","))
    deadline = time.monotonic() + args.timeout_s
    ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        missing = expected
        while missing and time.monotonic() < deadline:
            alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            missing = expected - alive
            if missing:
                time.sleep(0.5)
    finally:
        ray.shutdown()
    if missing:
        console.print(
            f"Ray knows {len(expected) - len(missing)} of {len(expected)} nodes, missing: {', '.join(missing)}"
        )
        return 1
    console.print(f"Ray has all {len(expected)} nodes: {', '.join(sorted(expected))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
