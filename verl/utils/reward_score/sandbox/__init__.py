"""A sandbox for submitted Python programs: no network, no writes, no other process, limits on the rest."""

from verl.utils.reward_score.sandbox.run import (
    ProgramResult,
    SandboxError,
    SandboxLimits,
    missing_protection,
    run_program,
    sandbox_layers,
)

__all__ = ["ProgramResult", "SandboxError", "SandboxLimits", "missing_protection", "run_program", "sandbox_layers"]
