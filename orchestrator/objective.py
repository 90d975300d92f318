"""The user's objective: found by its reference, loaded by path under a private name, checked in a child process.

A reference is ``package.module:function`` or ``path/to/file.py:function``. A file of the user's may be called
``storage.py`` or ``objectives.py``: it is loaded under a name of its own, and its folder goes to the end of sys.path.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
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
    is_path = where.endswith(".py") or "/" in where
    if not _is_dotted(function) or not (is_path or _is_dotted(where)):
        raise ObjectiveError(
            f"the objective {reference[:80]!r} must be package.module:function or path/to/file.py:function"
        )
    return where, function


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


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
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
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

    A child, because the user's module may print, exit, crash, start threads or processes; and without the database's
    URL. The answer comes over a pipe of its own, whatever the module does to stdout.

    Raises:
        ObjectiveError: what is wrong with it.
    """
    _refuse_unsafe_choices(read_source(reference, folder), split(reference)[1])
    with tempfile.TemporaryFile() as output, open_pipe() as (reader, writer):
        # -P: the working folder stays off sys.path, where a user's storage.py would take the place of ours.
        command = [sys.executable, "-P", "-m", "orchestrator.objective", reference, folder, str(writer)]
        child = subprocess.Popen(
            command, env=without_secrets(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            pass_fds=[writer], start_new_session=True,
        )  # fmt: skip
        try:
            exit_code = child.wait(CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ObjectiveError(f"importing the objective {reference} took more than {CHECK_TIMEOUT_S} s") from None
        finally:
            # Also what the module left running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.set_blocking(reader, False)
        try:
            problem = json.loads(os.read(reader, 1 << 20))["problem"]
        except (BlockingIOError, ValueError):
            output.seek(0)
            said = (output.read().decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise ObjectiveError(
                f"importing the objective {reference} ended the process (exit {exit_code}); it said: {said}"
            ) from None
    if problem is not None:
        raise ObjectiveError(problem)


@contextlib.contextmanager
def open_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is closed at the end, whichever ends are still open."""
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


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
    """Find a module's file without importing the packages around it, as importlib.util.find_spec would."""
    _look_in(folder)
    path: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(".".join(parts[:depth]), path) for find in finders if find is not None)
        spec = next((found for found in specs if found is not None), None)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            raise ObjectiveError(_no_module(name, folder))
        path = spec.submodule_search_locations
    if spec is None or spec.origin is None or not spec.has_location:
        raise ObjectiveError(_no_module(name, folder))
    return str(spec.origin)


def _no_module(name: str, folder: str) -> str:
    return f"the objective's module {name!r} is neither installed nor below {folder}"


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
    except SyntaxError as error:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
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
    os.write(int(sys.argv[3]), json.dumps({"problem": _problem(sys.argv[1], sys.argv[2])}).encode())
    os._exit(0)
