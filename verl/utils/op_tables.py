"""The op tables of a run as text: which entry is native and which is the reference."""

from __future__ import annotations

from collections.abc import Mapping


def op_tables_text(tables: Mapping[str, Mapping[str, str]]) -> str:
    """One line per entry under the name of its engine; ``tables`` is engine -> entry -> native, reference or parts."""
    width = max((len(name) for names in tables.values() for name in names), default=0)
    lines = []
    for engine, names in tables.items():
        lines.append(f"{engine} ops:")
        lines += [f"  {name:<{width}}  {kind}" for name, kind in sorted(names.items())]
    return "\n".join(lines)
