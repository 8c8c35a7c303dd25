"""What the commands of the subtree tool print."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_formats.files import write_text
from tools import marks
from tools.subtree import compare, snapshot, work
from tools.subtree.compare import ModuleDiff, SubtreeDiff
from tools.subtree.manifest import Manifest
from tools.subtree.rebase import Outcome

COLUMNS = ("same", "differs", "missing", "ours only")


def listing(console: Console, manifests: list[Manifest]) -> None:
    table = Table("upstream", "version", "licence", "our folder", "url")
    for item in manifests:
        pin = f"{item.version} ({item.commit[:8]})" if item.tag and item.commit else item.version
        table.add_row(item.name, pin, item.licence, item.subtree or "(facts only)", item.url)
    console.print(table)


def status(console: Console, manifests: list[Manifest], root: Path, names: bool) -> None:
    """Every subtree: its pin, its mirrored modules, its API beside the recorded one, its adaptations."""
    table = Table("upstream", "pin", "mirrored here", "not yet", *COLUMNS, "adaptations")
    marked_paths = [mark.path for mark in marks.collect(root)[0]]
    notes: list[str] = []
    details: list[tuple[str, ModuleDiff]] = []
    for item in manifests:
        if not item.subtree:
            table.add_row(item.name, item.version, "facts only", *[""] * 6)
            continue
        present, absent = compare.status(item, root)
        found = _beside_recorded(item, root, present, notes)
        counts = [str(number) for number in found.counts()] if found else ["-"] * 4
        details += [(item.name, module) for module in found.shared] if found else []
        num_marks = sum(path.startswith(item.subtree + "/") for path in marked_paths)
        options = [f"{len(item.options)} options"] if item.options else []
        here = " + ".join([*([str(len(present))] if present or not options else []), *options])
        notes += [f"{item.name}: modules of {item.older_tag}: {', '.join(item.older)}"] if item.older else []
        missing = "\n".join(absent) or "0"
        table.add_row(item.name, item.version, here, missing, *counts, str(num_marks))
    console.print(table)
    folders = tuple(f"{item.subtree}/" for item in manifests if item.subtree)
    num_elsewhere = sum(not path.startswith(folders) for path in marked_paths)
    say(console, *notes, *([f"{num_elsewhere} adaptation(s) outside of the subtrees"] if num_elsewhere else []))
    for name, module in details if names else ():
        module_names(console, module, f"{name}: ")


def _beside_recorded(item: Manifest, root: Path, present: list[str], notes: list[str]) -> SubtreeDiff | None:
    """Our API beside the recorded one; None, with the reason among ``notes``, when there is no comparison."""
    recorded = snapshot.load(item.name, root)
    if recorded is None:
        why = f"{item.name}: no API recorded yet: `import {item.name} --upstream ...` records it"
        notes += [why] if item.mirrored or item.options else []
        return None
    if recorded.pin != item.version:
        notes.append(f"{item.name}: the API was recorded at {recorded.pin}: `import {item.name}` records it anew")
    unrecorded = [module for module in present if module not in recorded.modules]
    notes += [f"{item.name}: no recorded API of {', '.join(unrecorded)}"] if unrecorded else []
    try:
        return snapshot.compare(item, recorded, root)
    except ValueError as error:  # a file with conflict markers, while a merge waits
        notes.append(f"{item.name}: {error}")
        return None


def adaptation_list(console: Console, root: Path, manifests: list[Manifest]) -> None:
    found, _ = marks.collect(root)
    folders = [item.subtree for item in manifests if item.subtree]
    table = Table("subtree", "id", "where", "what the hardware needs", "drop when")
    for mark in sorted(found, key=lambda mark: (mark.path, mark.line)):
        folder = next((folder for folder in folders if mark.path.startswith(folder + "/")), "")
        table.add_row(folder, mark.id, f"{mark.path}:{mark.line}", escape(mark.what), escape(mark.drop_when))
    console.print(table)


def difference(console: Console, item: Manifest, found: SubtreeDiff, names: bool) -> None:
    table = Table("module", *COLUMNS)
    for module in found.shared:
        counts = (module.same, module.differs, module.missing, module.ours_only)
        table.add_row(module.module, *(str(len(kind)) for kind in counts))
    table.add_section()
    table.add_row("all", *map(str, found.counts()))
    console.print(table)
    for module in found.shared if names else ():
        module_names(console, module)
    say(console, f"{len(found.shared)} modules on both sides, {len(found.missing)} only upstream")
    for name in found.ours_only:
        say(console, f"of {item.older_tag}: {name}" if name in item.older else f"ours only: {name}")


def module_names(console: Console, item: ModuleDiff, before: str = "") -> None:
    where = f"{before}{item.module}"
    for name, ours, theirs in item.differs:
        say(console, f"{where}: {name} differs", f"    ours     {ours}", f"    upstream {theirs}")
    say(console, *(f"{where}: {name} is missing here" for name in item.missing))
    say(console, *(f"{where}: {name} is ours only" for name in item.ours_only))


def rebased(console: Console, item: Manifest, outcome: Outcome, root: Path, text: bool, file: Path | None) -> None:
    """What a new version changes, as a list of work, in ``file`` if there is one; and what to do next."""
    listed = work.listed(item, outcome, root)
    if file is not None:
        write_text(file, listed)
        say(console, listed.splitlines()[-1], f"The list is in {file}.")
    else:
        say(console, listed)
    texts = outcome.changes.texts
    if texts:
        counted = f"{len(texts)} mirrored module(s) with another text: --text shows it"
        say(console, *(texts.values() if text else [counted]))
    say(
        console,
        f"{item.subtree or item.name}: our own code, so nothing was changed.",
        f"Next: port what you want, then `python -m tools.subtree import {item.name} --tag ...` records pin and API.",
    )


def say(console: Console, *lines: str) -> None:
    for line in lines:
        console.out(line, highlight=False)
