"""Finds the op table that a config names, without an import statement from the engine to a device package."""

from __future__ import annotations

import importlib

from megatron.core.ops.contract import TrainOps


def resolve(provider: str) -> TrainOps:
    """The table that ``module:function`` returns, e.g. ``megatron.core.ops.reference:reference_ops``.

    Raises ``ValueError`` when the text has another form, the module cannot be imported, or the result is no table.
    """
    module_name, separator, function_name = provider.partition(":")
    if not (separator and module_name and function_name):
        raise ValueError(f"train ops provider {provider!r}: expected 'module:function', e.g. {_EXAMPLE!r}")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"train ops provider {provider!r}: {error}; install the device package or use {_EXAMPLE!r}"
        ) from error
    ops = factory()
    if not isinstance(ops, TrainOps):
        raise ValueError(f"train ops provider {provider!r} returned {type(ops).__name__}; expected TrainOps")
    return ops


_EXAMPLE = "megatron.core.ops.reference:reference_ops"
