"""Bad input gets one line and exit 1, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import Orch

FINE = "def objective(trial):\n    return trial.suggest_float('x', 0, 1)\n"
FILES = {
    "fine.py": FINE,
    "raises.py": "raise RuntimeError('boom')\n",
    "leaves.py": "import os; os._exit(7)\n",
    "syntax.py": "x = (\n",
    "tuples.py": "def objective(trial):\n    return trial.suggest_categorical('size', [(1, 2), (3, 4)])\n",
    "typo.yaml": "name: s\nobjective: fine.py:objective\npruner: none\nn_trails: 10\n",
    "broken.yaml": "name: s\n  objective: fine.py:objective\n",
}
CREATE = ("study", "create", "s", "--pruner", "none", "--objective")
UNREACHABLE = "postgresql://somebody:secretword@127.0.0.1:1/nowhere"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*CREATE, "missing.py:objective"), "missing.py: No such file"),
        ((*CREATE, "fine.py:wrong"), "has no function 'wrong'"),
        ((*CREATE, "no.such.module:objective"), "module 'no.such.module' is neither installed nor below"),
        ((*CREATE, "raises.py:objective"), "raised RuntimeError: boom"),
        ((*CREATE, "leaves.py:objective"), "ended the process (exit 7)"),
        ((*CREATE, "syntax.py:objective"), "line 1"),
        ((*CREATE, "tuples.py:objective"), "the choice (1, 2) is a tuple"),
        ((*CREATE, "fine.py:objective", "--sampler", "tpee"), "did you mean 'tpe'?"),
        ((*CREATE, "fine.py:objective", "--storage", UNREACHABLE), "127.0.0.1"),
        ((*CREATE, "fine.py:objective", "--storage", "sqlite:///x.db"), "postgresql://"),
        (("study", "create", "x" * 600, "--pruner", "none", "--objective", "fine.py:objective"), "512"),
        (("study", "create", "-f", "typo.yaml"), "did you mean 'n_trials'?"),
        (("study", "create", "-f", "broken.yaml"), "broken.yaml, line 2"),
        (("study", "create", "s", "--objective", "fine.py:objective"), "--max-steps"),
        (("run", "typo.yaml", "--cpu", "1"), "did you mean 'n_trials'?"),
        (("pool", "start", "nobody", "--cpu", "1"), "there is no study 'nobody'"),
        (("trial", "show", "nobody", "0"), "there is no study 'nobody'"),
        (("study", "delete", "nobody", "--yes"), "there is no study 'nobody'"),
    ],
    ids=lambda value: value.replace(" ", "-")[:30] if isinstance(value, str) else "",
)
def test_bad_input_gets_one_line_and_leaves_nothing(orch: Orch, arguments: tuple[str, ...], says: str) -> None:
    """A command that cannot do what it was asked says why in one line, exits with 1 and writes nothing."""
    for name, text in FILES.items():
        orch.write(name, text)
    line = orch.refused(*arguments)
    assert says in line
    assert "secretword" not in line
    assert orch.json("study", "list") == []
    assert [path for path in Path(orch.home).rglob("*") if path.is_file()] == []
    orch.nothing_left()


def test_an_existing_study_is_refused_unless_the_definition_is_the_same(orch: Orch) -> None:
    """Creating a study again works with the same definition only, whatever the seed that nobody chose."""
    orch.write("fine.py", FINE)
    create = ("study", "create", "s", "--objective", "fine.py:objective", "--pruner", "none", "--n-trials", "3")
    orch.ok(*create)
    assert "exists already" in orch.ok(*create)
    assert "exists with n_trials = 3, not 4" in orch.refused(*create[:-1], "4")
    assert "exists with direction" in orch.refused(*create, "--direction", "maximize")
    orch.write("fine.py", FINE + "# changed\n")
    assert "its objective has changed" in orch.refused(*create)


def test_a_pool_refuses_an_objective_that_changed_until_it_is_accepted(orch: Orch) -> None:
    """A changed objective file is refused with both hashes; --accept-objective records the new one."""
    orch.write("fine.py", FINE)
    orch.ok("study", "create", "s", "--objective", "fine.py:objective", "--pruner", "none", "--n-trials", "1")
    recorded = orch.json("study", "show", "s")["facts"]["objective"]["sha256"]
    orch.write("fine.py", FINE + "# changed\n")
    line = orch.refused("pool", "start", "s", "--cpu", "1")
    assert recorded in line
    assert "--accept-objective" in line
    orch.ok("pool", "start", "s", "--cpu", "1", "--accept-objective")
    facts = orch.json("study", "show", "s")["facts"]["objective"]
    assert facts["sha256"] != recorded
    assert facts["source"].endswith("# changed\n")
    assert orch.json("trial", "list", "s")[0]["state"] == "COMPLETE"
