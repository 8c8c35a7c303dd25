"""Pickles of every Python version are read by a list, made by hand where this Python would write another form."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import pytest

from hf_formats.listed_pickle import PATHS, load_listed


class Color(Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias
    BLUE = "blue"

    def shout(self) -> str:
        return self.value.upper()


class Other(Enum):
    RED = 1


@dataclass
class Paint:
    color: Color
    layers: frozenset[int]


HERE = __name__
NAMES = PATHS | {(HERE, "Color"): Color, (HERE, "Paint"): Paint, ("collections", "OrderedDict"): OrderedDict}
COLOR, GETATTR, END = f"c{HERE}\nColor\n".encode(), b"cbuiltins\ngetattr\n", b"."


def load(content: bytes) -> Any:
    return load_listed(io.BytesIO(content), NAMES, "a test")


def text(value: str) -> bytes:
    """The opcodes of a string in protocol 2."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def attribute(of: bytes, name: str) -> bytes:
    """``getattr(of, name)`` as opcodes."""
    return GETATTR + of + text(name) + b"\x86R"


class ByGetattr(pickle.Pickler):
    """Pickles enums as Python 3.11.0 to 3.11.4 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


class ByValue(pickle.Pickler):
    """Pickles enums as all other versions do."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [ByGetattr, ByValue])
def test_members_of_enums_are_read_in_both_forms(pickler: type[pickle.Pickler], protocol: int) -> None:
    content = io.BytesIO()
    value = [Paint(Color.BLUE, frozenset({1, 2})), OrderedDict(a=Color.RED)]
    pickler(content, protocol).dump(value)
    assert (b"getattr" in content.getvalue()) == (pickler is ByGetattr)
    assert load(content.getvalue()) == value
    assert load(content.getvalue())[0].color is Color.BLUE


def test_an_alias_is_the_member_it_stands_for() -> None:
    assert load(attribute(COLOR, "CRIMSON") + END) is Color.RED


REFUSED = {
    "the class of an enum": attribute(COLOR, "__class__"),
    "a method of an enum": attribute(COLOR, "shout"),
    "mro": attribute(COLOR, "mro"),
    "the table of members": attribute(COLOR, "__members__"),
    "an attribute of a member": attribute(attribute(COLOR, "RED"), "value"),
    "the class of a member": attribute(attribute(COLOR, "RED"), "__class__"),
    "a nested getattr": attribute(attribute(COLOR, "__class__"), "__init__"),
    "getattr of getattr": attribute(GETATTR, "__self__"),
    "getattr of a class that is no enum": attribute(f"c{HERE}\nPaint\n".encode(), "__init__"),
    "getattr of an instance": attribute(b"]", "append"),
    "a name that is no text": GETATTR + COLOR + b"K\x01\x86R",
    "a third argument": GETATTR + COLOR + text("NONE") + b"N\x87R",
    "an enum that is not listed": attribute(f"c{HERE}\nOther\n".encode(), "RED"),
    "a dotted name": f"c{HERE}\nColor.RED\n".encode(),
    "a dotted name in STACK_GLOBAL": b"\x80\x04" + text(HERE) + text("Color.__init__.__globals__") + b"\x93",
    "a dotted path": b"cpathlib\nPosixPath.home\n(tR",
    "setattr": b"cbuiltins\nsetattr\n" + COLOR + text("x") + b"K\x01\x87R",
    "eval": b"cbuiltins\neval\n" + text("1") + b"\x85R",
    "eval of protocol 2": b"c__builtin__\neval\n" + text("1") + b"\x85R",
    "a command": b"cos\nsystem\n" + text("exit 1") + b"\x85R",
    "the getter of operator": b"coperator\nattrgetter\n" + text("x") + b"\x85R",
    "a persistent id": b"Pid\n",
    "an extension code": b"\x82\x01",
    "a value that no member has": COLOR + text("green") + b"\x85R",
    "nothing": b"",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_everything_else_is_refused(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load(content + END)


def test_getattr_itself_never_leaves_the_reader() -> None:
    stand_in = load(GETATTR + END)
    assert stand_in is not getattr
    with pytest.raises(pickle.UnpicklingError, match="asks for the attribute '__class__'"):
        stand_in(Color, "__class__")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_under_both_module_names_on_any_system(module: str) -> None:
    for name in ("PosixPath", "PurePosixPath"):
        parts = b"(" + text("/") + text("a") + text("b") + b"t"  # before Python 3.13
        assert load(f"c{module}\n{name}\n".encode() + parts + b"R.") == PurePosixPath("/a/b")
        assert load(f"c{module}\n{name}\n".encode() + text("/a/b") + b"\x85R.") == PurePosixPath("/a/b")
    for name in ("WindowsPath", "PureWindowsPath"):
        assert load(f"c{module}\n{name}\n".encode() + text(r"C:\a") + b"\x85R.") == PureWindowsPath("C:/a")


def test_a_pickle_cannot_change_a_class_or_a_member() -> None:
    """The opcode BUILD sets the state of whatever lies on the stack."""
    state = b"N}" + text("layers") + b"K\x01s\x86b"
    paint = Paint(Color.RED, frozenset())
    for target in (f"c{HERE}\nPaint\n".encode(), COLOR, attribute(COLOR, "RED")):
        with pytest.raises(pickle.UnpicklingError, match="it changes"):
            load(target + state + END)
    with pytest.raises(pickle.UnpicklingError):
        load(attribute(COLOR, "RED") + b"}" + text("_value_") + b"K\x01sb.")
    assert Color.RED.value == "red" and "layers" not in vars(Color) | vars(Color.RED) | vars(Paint)
    assert paint.layers == frozenset()
