"""Errors that are ValueErrors here and of the type that upstream's plug-ins catch as well."""

from __future__ import annotations


class BatchError(ValueError, AssertionError):
    """A batch, or an argument of a function on batches, that does not fit."""


class UnknownNameError(ValueError, NotImplementedError):
    """A name, or a combination, for which there is no implementation."""


class TooLongError(ValueError, RuntimeError):
    """A text with more tokens than allowed."""


class MissingFieldError(KeyError, AttributeError):
    """A config without a field, asked for like a key."""
