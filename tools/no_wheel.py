"""The build backend that pyproject.toml names: it refuses every kind of package, editable ones too.

The folders `vllm`, `verl` and `megatron` have the names of published packages, which a wheel of this repository would
overwrite and an editable install would hide. They are used from a checkout: PYTHONPATH and the command `vllm` of
tools/setup_env.sh lead to it, in the project's own environment.
"""

from __future__ import annotations

from typing import NoReturn


def refuse(*arguments: object, **settings: object) -> NoReturn:
    """End pip, `python -m build` and other installers, with the remedy."""
    raise SystemExit(
        "error: this repository is not a package: it would install vllm, verl, megatron, mindspeed and vllm_ascend "
        "over the published ones. Run bash tools/setup_env.sh, which makes an environment with what it needs, and use "
        "it from the checkout: source .venv/bin/activate, and PYTHONPATH=<the checkout> elsewhere "
        "(docs/installation.md)"
    )


build_wheel = build_sdist = build_editable = refuse
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = refuse
