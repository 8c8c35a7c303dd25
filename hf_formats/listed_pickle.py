"""Reads pickles of other machines by a list of what they may refer to, in the forms of every Python version."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Any, TypeAlias

Names: TypeAlias = dict[tuple[str, str], Any]
"""(module, name) as a pickle gives them -> the class or function that stands for it."""

# Python 3.13 pickles paths by the module in which it defines them. Paths of any system are readable on any other.
PATHS: Names = {
    (module, name): (lambda *parts: PureWindowsPath(*parts)) if "Windows" in name else lambda *p: PurePosixPath(*p)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_BUILTINS = ("builtins", "__builtin__")  # the second: protocols before 3, which have no opcode for sets either
_SETS: Names = {(module, kind.__name__): kind for module in _BUILTINS for kind in (set, frozenset)}
_DAMAGE = (
    AttributeError, EOFError, ImportError, IndexError, KeyError, MemoryError, OverflowError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


def load_listed(file: IO[bytes], names: Names, what: str, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """Return ``what`` a pickle holds; ``UnpicklingError`` when it is damaged or refers to anything but ``names``.

    Python 3.11.0 to 3.11.4 pickle a member of an enum as ``getattr(kind, name)``, all others as ``kind(value)``. Both
    are read. For ``getattr`` stands a function that knows nothing but the members of the enums in ``names``.
    """
    with _unchanged(value for value in names.values() if isinstance(value, type)):
        try:
            return _ListedUnpickler(file, names, what, persistent_load).load()
        except _DAMAGE as error:
            raise pickle.UnpicklingError(f"it is damaged: {error!r}") from error


class _ListedUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: Names, what: str, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._names, self._what = _SETS | names, what
        self._persistent_load = persistent_load

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise pickle.UnpicklingError(f"it refers to {pid!r} outside of it")
        return self._persistent_load(pid)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        if module in _BUILTINS and name == "getattr":
            return _member_of([value for value in self._names.values() if isinstance(value, EnumMeta)])
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which no such file does: {name} is no part of {self._what}"
        )


def _member_of(enums: list[EnumMeta]) -> Callable[[Any, Any], Any]:
    def member(kind: Any, name: Any) -> Any:
        if any(kind is enum for enum in enums) and type(name) is str and name in kind.__members__:
            return kind.__members__[name]
        raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of {kind!r}, which no such file does")

    return member


@contextmanager
def _unchanged(kinds: Iterator[type]) -> Iterator[None]:
    """Undo and refuse what a pickle does to a class or a member of an enum: it may set the state of new objects."""
    owners: list[Any] = [owner for kind in kinds for owner in (kind, *(kind if isinstance(kind, EnumMeta) else ()))]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        changed = [owner for owner, held in before if _restore(owner, held)]
    if changed:
        raise pickle.UnpicklingError(f"it changes {changed}, which no such file does")


def _restore(owner: Any, held: dict[str, Any]) -> bool:
    found = dict(vars(owner))
    added = found.keys() - held.keys() - {"__slotnames__"}  # pickling in another thread adds that one
    lost = [name for name, value in held.items() if name not in found or found[name] is not value]
    base = type if isinstance(owner, type) else object
    for name in added:
        base.__delattr__(owner, name)
    for name in lost:
        base.__setattr__(owner, name, held[name])
    return bool(added or lost)
