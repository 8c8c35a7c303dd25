"""What is wrong with the file of a reward function, found by reading it: nothing of the user's is run."""

from __future__ import annotations

import ast
import inspect
import tokenize
from pathlib import Path

from verl.utils.import_utils import MODULE_PREFIX
from verl.utils.reward_score.functions import RewardFunctionSpec, signature_problem

_KINDS = inspect.Parameter


def file_problem(spec: RewardFunctionSpec) -> str | None:
    """Why ``spec`` cannot be a reward function, in one sentence: file, syntax, name or signature.

    A name that the file does not define itself (an import, an assignment) is left to the check that runs the file.
    """
    if spec.path.startswith(MODULE_PREFIX):
        return None  # it is found by importing, which the check that runs it does
    path = Path(spec.path).expanduser()
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except OSError as error:
        return f"{spec.path}: {error.strerror}; expected the Python file of a reward function"
    except UnicodeDecodeError:
        return f"{spec.path} is not text; expected the Python file of a reward function"
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{spec.path} is not Python{line}: {getattr(error, 'msg', error)}"
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if spec.name in own and not functions[spec.name].decorator_list:
        return signature_problem(spec, _signature(functions[spec.name].args))
    names = _other_names(tree)
    if spec.name in names or "*" in names:
        return None
    defined = f"; it defines {', '.join(sorted(own))}" if own else ""
    return f"{spec.path} defines no {spec.name!r}{defined}"


def _other_names(tree: ast.Module) -> set[str]:
    """Every name that something binds in the file; ``*`` is a star import, which may bind any."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a definition; every default is ``...``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    found = []
    for index, argument in enumerate(positional):
        is_first = index < len(arguments.posonlyargs)
        kind = _KINDS.POSITIONAL_ONLY if is_first else _KINDS.POSITIONAL_OR_KEYWORD
        default = ... if index >= num_required else _KINDS.empty
        found.append(_KINDS(argument.arg, kind, default=default))
    if arguments.vararg:
        found.append(_KINDS(arguments.vararg.arg, _KINDS.VAR_POSITIONAL))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_KINDS(argument.arg, _KINDS.KEYWORD_ONLY, default=_KINDS.empty if value is None else ...))
    if arguments.kwarg:
        found.append(_KINDS(arguments.kwarg.arg, _KINDS.VAR_KEYWORD))
    return inspect.Signature(found)
