"""Errors that are ValueErrors here and of the type that upstream's callers expect as well."""

from __future__ import annotations


class BatchError(ValueError, AssertionError):
    """A batch, or an argument of a function on batches, that does not fit."""


class UnknownNameError(ValueError, NotImplementedError):
    """A name, or a combination, for which there is no implementation."""


class WrongTypeError(ValueError, TypeError):
    """A value, often a class that a config names, of another type than expected."""


class TooLongError(ValueError, RuntimeError):
    """A text with more tokens than allowed."""


class MissingFileError(ValueError, FileNotFoundError):
    """A file that a config names and that does not exist."""


class MissingModuleError(ValueError, ModuleNotFoundError):
    """A module that a config names and that cannot be imported."""


class BrokenModuleError(ValueError, RuntimeError):
    """A file that a config names and that raises when it is imported."""


class MissingNameError(ValueError, AttributeError):
    """A file or a module that does not define a name."""


class MissingFieldError(KeyError, AttributeError):
    """A config without a field, asked for like a key."""
