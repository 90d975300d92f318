"""The user's objective: found by its reference, loaded by path under a private name, checked in a child process.

A reference is ``package.module:function`` or ``path/to/file.py:function``. A file of the user's may be called
``storage.py`` or ``objectives.py``: it is loaded under a name of its own, and its folder goes to the end of sys.path.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.errors import ObjectiveError

CHECK_TIMEOUT_S = 300
# What a child that runs the user's code must not inherit: the way into the database.
SECRETS = ("ORCH_STORAGE", "PG")


@dataclass(frozen=True)
class Source:
    """The objective's source file as it is now."""

    path: str
    text: str
    sha256: str


def split(reference: str) -> tuple[str, str]:
    """Split a reference into its module or file, and its function.

    Raises:
        ObjectiveError: it is no reference.
    """
    where, _, function = reference.rpartition(":")
    if not where or not function.replace(".", "_").isidentifier():
        raise ObjectiveError(
            f"the objective {reference[:80]!r} must be package.module:function or path/to/file.py:function"
        )
    return where, function


def is_file(reference: str) -> bool:
    """Whether a reference names a file and not a module."""
    where, _ = split(reference)
    return where.endswith(".py") or "/" in where


def resolve(reference: str, folder: str | Path) -> str:
    """Make a file reference absolute, seen from `folder`; a module reference stays as it is."""
    if not is_file(reference):
        return reference
    where, function = split(reference)
    return f"{Path(folder, Path(where).expanduser()).resolve()}:{function}"


def load(reference: str, folder: str) -> Callable[[Any], Any]:
    """Import the objective; modules are looked for in `folder` too, as `python -m` would.

    Raises:
        ObjectiveError: there is no such module, file or function. What the module itself raises goes through.
    """
    where, function = split(reference)
    if is_file(reference):
        module = _load_file(Path(where))
    else:
        _look_in(folder)
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not where.startswith(error.name):
                raise
            raise ObjectiveError(_no_module(where, folder)) from None
    try:
        found = reduce(getattr, function.split("."), module)
    except AttributeError:
        raise ObjectiveError(f"{where} has no function {function!r}") from None
    if not callable(found):
        raise ObjectiveError(f"{function!r} in {where} is not a function")
    return found


def read_source(reference: str, folder: str) -> Source:
    """Read the file that holds the objective, without importing it.

    Raises:
        ObjectiveError: there is none.
    """
    where, _ = split(reference)
    path = where if is_file(reference) else _module_file(where, folder)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ObjectiveError(f"cannot read the objective {where}: {error.strerror or error}") from None
    return Source(path, data.decode(errors="replace"), hashlib.sha256(data).hexdigest())


def check(reference: str, folder: str) -> None:
    """Import the objective in a child process, and see that it can be called with one trial.

    A child, because the user's module may print, exit, crash or start threads; and without the database's URL.

    Raises:
        ObjectiveError: what is wrong with it.
    """
    _refuse_unsafe_choices(read_source(reference, folder), split(reference)[1])
    # -P: the working folder stays off sys.path, where a user's storage.py would take the place of ours.
    command = [sys.executable, "-P", "-m", "orchestrator.objective", reference, folder]
    try:
        done = subprocess.run(
            command, env=without_secrets(), capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ObjectiveError(f"importing the objective {reference} took more than {CHECK_TIMEOUT_S} s") from None
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        problem = json.loads(last[0])["problem"]
    except (ValueError, KeyError, TypeError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ObjectiveError(
            f"importing the objective {reference} ended the process (exit {done.returncode}); it said: {said}"
        ) from None
    if problem is not None:
        raise ObjectiveError(problem)


def without_secrets() -> dict[str, str]:
    """The environment for code of the user's: without what opens the database."""
    return {key: value for key, value in os.environ.items() if not key.startswith(SECRETS)}


def _load_file(path: Path) -> ModuleType:
    name = f"orch_objective_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ObjectiveError(f"there is no objective file {path}")
    _look_in(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ObjectiveError(f"the objective file {path} must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_file(name: str, folder: str) -> str:
    _look_in(folder)
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ObjectiveError(_no_module(name, folder))
    return spec.origin


def _no_module(name: str, folder: str) -> str:
    return f"there is no module {name!r}, neither installed nor below {folder}"


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _refuse_unsafe_choices(source: Source, function: str) -> None:
    """Find choices written as tuples or lists: they come back from the database as lists (optuna#2328)."""
    try:
        tree = ast.parse(source.text)
    except SyntaxError as error:
        raise ObjectiveError(f"{source.path}, line {error.lineno}: {error.msg}") from None
    for call in (node for part in _reached(tree, function) for node in ast.walk(part) if isinstance(node, ast.Call)):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "suggest_categorical"):
            continue
        given = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "choices")]
        for choices in (node for node in given if isinstance(node, ast.List | ast.Tuple)):
            for choice in choices.elts:
                if isinstance(choice, ast.List | ast.Tuple | ast.Dict | ast.Set):
                    raise ObjectiveError(
                        f"{source.path}, line {choice.lineno}: the choice {ast.unparse(choice)} is a "
                        f"{type(choice).__name__.lower()}; choices can only be None, bool, int, float or str: suggest "
                        "a name, and look the value up in a dict"
                    )


def _reached(tree: ast.Module, function: str) -> list[ast.AST]:
    """The definitions of a module that an objective can reach by their names, itself included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}
    found: dict[str, ast.AST] = {}
    wanted = [function.split(".")[-1], *function.split(".")]
    while wanted:
        name = wanted.pop()
        if name in defined and name not in found:
            found[name] = defined[name]
            for node in ast.walk(defined[name]):
                wanted += [node.id] if isinstance(node, ast.Name) else []
                wanted += [node.attr] if isinstance(node, ast.Attribute) else []
    return list(found.values())


def _problem(reference: str, folder: str) -> str | None:
    """What is wrong with the objective, in one sentence; None when it can be called with a trial."""
    try:
        function = load(reference, folder)
    except ObjectiveError as error:
        return str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = traceback.format_exception_only(error)[-1].strip()
        return f"importing the objective {reference} raised {said} ({where.filename}, line {where.lineno})"
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return f"the objective {reference} must take one argument, the trial"
    except ValueError:
        pass  # a builtin without a signature
    return None


if __name__ == "__main__":
    # The answer is the last line of stdout, whatever the user's module printed before.
    answer = json.dumps({"problem": _problem(sys.argv[1], sys.argv[2])})
    print("\n" + answer, flush=True)
    os._exit(0)
