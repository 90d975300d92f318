"""The user's objective: references, loading beside our own modules, and the check in a child process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap

import psutil
import pytest

from orchestrator import objective
from orchestrator.errors import ObjectiveError
from tests.runs import wait_for

PLAIN = "def objective(trial):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def clean_imports():
    """What a test imports, and where it looked, is forgotten after it."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    """Write a file of the user's, and return its path."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def refusal(reference: str, folder: object) -> str:
    """The one line with which `check` refuses an objective."""
    with pytest.raises(ObjectiveError) as refused:
        objective.check(reference, str(folder))
    message = str(refused.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("train.py:objective", ("train.py", "objective")),
        ("pkg.mod:objective", ("pkg.mod", "objective")),
        ("pkg.mod:Class.method", ("pkg.mod", "Class.method")),
        ("/a:b/train.py:objective", ("/a:b/train.py", "objective")),
    ],
)
def test_split(reference, parts):
    """A reference is a file or module and a function, split at its last colon."""
    assert objective.split(reference) == parts


@pytest.mark.parametrize(
    "reference", ["", "train.py", ":objective", "train.py:", "train.py:a b", "train.py:1f", "x" * 999]
)
def test_no_references(reference):
    """What is no reference is refused in a short line that shows both forms."""
    with pytest.raises(ObjectiveError, match=r"package\.module:function or path/to/file\.py:function") as refused:
        objective.split(reference)
    assert len(str(refused.value)) < 200


def test_resolve(tmp_path, monkeypatch):
    """File references become absolute, seen from the given folder; modules stay as they are."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert objective.resolve("train.py:f", tmp_path) == f"{tmp_path}/train.py:f"
    assert objective.resolve("../train.py:f", tmp_path) == f"{tmp_path.parent}/train.py:f"
    assert objective.resolve("~/train.py:f", tmp_path) == "/home/someone/train.py:f"
    assert objective.resolve("pkg.mod:f", tmp_path) == "pkg.mod:f"


@pytest.mark.parametrize("name", ["storage.py", "objectives.py", "orchestrator.py", "optuna.py", "my file-1.py"])
def test_files_called_like_ours(write, tmp_path, name):
    """A user's file of any name loads under a private one, and does not take the place of the module of that name."""
    import storage

    path = write(name, PLAIN)
    function = objective.load(f"{path}:objective", str(tmp_path))
    assert function(None) == 1.0
    assert function.__module__.startswith("orch_objective_")
    assert sys.modules["storage"] is storage
    objective.check(f"{path}:objective", str(tmp_path))


def test_check_in_a_folder_that_has_a_storage_py(write, tmp_path, monkeypatch):
    """`check` works in a folder whose own storage.py, objectives.py and optuna.py would break ours."""
    for name in ("storage.py", "objectives.py", "optuna.py", "json.py"):
        write(name, "raise RuntimeError('taken for a module of ours')\n")
    path = write("train.py", PLAIN)
    monkeypatch.chdir(tmp_path)
    objective.check(f"{path}:objective", str(tmp_path))


def test_siblings(write, tmp_path):
    """Modules and packages beside the file can be imported."""
    write("model.py", "WIDTH = 5\n")
    write("layers/__init__.py", "from layers.dense import DEPTH\n")
    write("layers/dense.py", "DEPTH = 2\n")
    path = write("train.py", "import model\nfrom layers import DEPTH\ndef f(trial):\n    return model.WIDTH * DEPTH\n")
    objective.check(f"{path}:f", str(tmp_path))
    assert objective.load(f"{path}:f", str(tmp_path))(None) == 10


def test_module_reference(write, tmp_path):
    """A module below the folder is found as `python -m` would find it, and methods are functions too."""
    write("work/__init__.py", "")
    write("work/train.py", "class Task:\n    @staticmethod\n    def run(trial):\n        return 3\n")
    objective.check("work.train:Task.run", str(tmp_path))
    assert objective.load("work.train:Task.run", str(tmp_path))(None) == 3
    assert objective.read_source("work.train:Task.run", str(tmp_path)).path == str(tmp_path / "work/train.py")


def test_loading_twice_is_one_module(write, tmp_path):
    """The second load of a file is the same module; two files of one name are two."""
    first, second = write("a/train.py", PLAIN), write("b/train.py", PLAIN)
    assert objective.load(f"{first}:objective", "/") is objective.load(f"{first}:objective", "/")
    assert objective.load(f"{first}:objective", "/") is not objective.load(f"{second}:objective", "/")


def test_a_failed_import_is_tried_again(write, tmp_path):
    """A module that could not be imported leaves nothing half-made behind."""
    path = write("train.py", "raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        objective.load(f"{path}:objective", "/")
    write("train.py", PLAIN)
    assert objective.load(f"{path}:objective", "/")(None) == 1.0


def test_source(write, tmp_path):
    """The recorded source is the file's text and the hash of its bytes; the file is not imported."""
    path = write("train.py", "raise SystemExit\n")
    source = objective.read_source(f"{path}:objective", str(tmp_path))
    assert (source.path, source.text) == (path, "raise SystemExit\n")
    assert source.sha256 == hashlib.sha256(b"raise SystemExit\n").hexdigest()


def test_source_of_a_package_does_not_import_it(write, tmp_path):
    """Reading the source of `pkg.mod:f` runs nothing of pkg in orch's own process."""
    write("zz_package/__init__.py", "raise SystemExit('imported')\n")
    path = write("zz_package/train.py", PLAIN)
    assert objective.read_source("zz_package.train:objective", str(tmp_path)).path == path
    assert "zz_package" not in sys.modules


@pytest.mark.parametrize(
    "reference",
    [
        "{folder}/none.py:objective",
        "zz_none:objective",
        "zz_none.sub:objective",
        "{folder}/:f",
        "{folder}:f",
        ".rel:f",
    ],
)
def test_missing_files_and_modules(tmp_path, reference):
    """A file or module that is not there is refused in one line that names it."""
    where = reference.format(folder=tmp_path)
    assert where.rpartition(":")[0].rstrip("/") in refusal(where, tmp_path)


def test_main_is_no_module(tmp_path, monkeypatch):
    """`__main__:f` means orch's own script, which has no source that could be recorded: refused in one line."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as it is in the `orch` script
    assert "__main__" in refusal("__main__:f", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def other(trial):\n    return 1\n", "has no function 'objective'"),
        ("objective = 3\n", "is not a function"),
        ("def objective():\n    return 1\n", "must take one argument, the trial"),
        ("def objective(trial, data):\n    return 1\n", "must take one argument, the trial"),
        ("def objective(*, trial):\n    return 1\n", "must take one argument, the trial"),
        ("x = 1\nraise ValueError('no data here')\n", "ValueError: no data here ({path}, line 2)"),
        ("import zz_not_installed\n", "ModuleNotFoundError: No module named 'zz_not_installed' ({path}, line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 ({path}, line 2)"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt ({path}, line 1)"),
        ("import os\nos._exit(4)\n", "ended the process (exit 4)"),
        ("import os\nos._exit(0)\n", "ended the process (exit 0)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "ended the process (exit -9)"),
        ("def objective(trial):\n    return (1\n", "line 2: "),
        ("def objective(trial):\nreturn 1\n", "line 2: expected an indented block"),
        ("x = 1\n\0\n", "null bytes"),
    ],
)
def test_modules_that_are_no_objective(write, tmp_path, text, said):
    """Whatever a module does when it is imported, the refusal is one clear line about it."""
    path = write("train.py", text)
    message = refusal(f"{path}:objective", tmp_path)
    assert said.format(path=path) in message
    assert path in message


def test_last_words(write, tmp_path):
    """What a module said on stderr before it took the process down is in the refusal."""
    path = write("train.py", "import os, sys\nprint('no licence', file=sys.stderr, flush=True)\nos._exit(1)\n")
    assert "it said: no licence" in refusal(f"{path}:objective", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "print('hello', end='')\n",
        'print(\'{"problem": "mine"}\')\n',
        "import sys\nsys.stdout = sys.stderr\n",
        "import sys\nsys.stdout.close()\n",
        "import os\nos.write(1, b'\\xff\\xfe')\nos.write(2, b'\\xff\\xfe')\n",
        "import warnings\nwarnings.warn('old', stacklevel=1)\n",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n",
        "import atexit, os\natexit.register(os._exit, 5)\n",
    ],
)
def test_modules_that_are_noisy(write, tmp_path, text):
    """A module that prints, redirects, warns or starts threads when imported is a good objective all the same."""
    path = write("train.py", text + PLAIN)
    objective.check(f"{path}:objective", str(tmp_path))


def test_module_that_leaves_a_process_running(write, tmp_path, monkeypatch):
    """A process that the module starts does not keep `check` waiting, and is gone with it."""
    monkeypatch.setattr(objective, "CHECK_TIMEOUT_S", 3)
    text = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({pid!r}, 'w').write(str(child.pid))\n"
    path = write("train.py", text.format(pid=str(tmp_path / "pid")) + PLAIN)
    try:
        objective.check(f"{path}:objective", str(tmp_path))
        pid = int((tmp_path / "pid").read_text())
        wait_for(lambda: not psutil.pid_exists(pid), "the process is gone", 10.0)
    finally:
        subprocess.run(["kill", "-9", (tmp_path / "pid").read_text()], check=False, capture_output=True)


def test_module_that_hangs(write, tmp_path, monkeypatch):
    """An import that never ends is refused with the time that it was given."""
    monkeypatch.setattr(objective, "CHECK_TIMEOUT_S", 1)
    path = write("train.py", "import threading\nthreading.Event().wait()\n")
    assert "took more than 1 s" in refusal(f"{path}:objective", tmp_path)


def test_the_missing_module_is_the_one_named(write, tmp_path):
    """A dependency that is not installed is named, also when the objective's own module begins with its name."""
    write("zzlib_train.py", "import zzlib\n" + PLAIN)
    message = refusal("zzlib_train:objective", tmp_path)
    assert "No module named 'zzlib'" in message
    assert "there is no module 'zzlib_train'" not in message


def test_syntax_error_in_a_sibling(write, tmp_path):
    """A syntax error in a module that the objective imports is shown with that module's file and line."""
    write("zz_model.py", "x = 1\ny = = 2\n")
    path = write("train.py", "import zz_model\n" + PLAIN)
    assert "zz_model.py, line 2" in refusal(f"{path}:objective", tmp_path)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("trial.suggest_categorical('layers', [(64, 64), (128,)])", "(64, 64) is a tuple"),
        ("trial.suggest_categorical('layers', choices=['a', [1, 2]])", "[1, 2] is a list"),
        ("trial.suggest_categorical(choices=({'a': 1},), name='layers')", "{'a': 1} is a dict"),
    ],
)
def test_choices_that_do_not_survive_the_database(write, tmp_path, call, shown):
    """Literal choices that are tuples, lists or dicts are refused with their line, before the module is imported."""
    path = write("train.py", f"import os\ndef objective(trial):\n    x = 1\n    return {call}\nos._exit(1)\n")
    message = refusal(f"{path}:objective", tmp_path)
    assert f"{path}, line 4: the choice {shown}" in message
    assert "look the value up in a dict" in message


def test_choices_that_are_fine(write, tmp_path):
    """Choices of None, bool, int, float and str, and lists that are no choices, are left alone."""
    text = "CHOICES = [(1, 2)]\ndef objective(trial):\n    other('x', [(1, 2)])\n"
    text += "    return trial.suggest_categorical('x', [None, True, 1, -2.5, 'a'])\n"
    path = write("train.py", text)
    objective.check(f"{path}:objective", str(tmp_path))


def test_no_secrets_in_the_child(write, tmp_path, monkeypatch):
    """The module is imported without what opens the database, and with the rest of the environment."""
    for name in ("ORCH_STORAGE", "PGPASSWORD", "PGHOST", "PGSERVICEFILE"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("MY_DATA", "here")
    text = "import os\nleft = [k for k in os.environ if k.startswith(('PG', 'ORCH_STORAGE'))]\n"
    text += "assert not left, left\nassert os.environ['MY_DATA'] == 'here'\n"
    path = write("train.py", text + PLAIN)
    objective.check(f"{path}:objective", str(tmp_path))
