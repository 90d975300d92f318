"""The Trial that an objective sees, on several ranks, against a leader that answers from a script."""

from __future__ import annotations

import itertools
import math
from datetime import datetime
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution, IntDistribution, distribution_to_json, json_to_distribution
from optuna.study import StudyDirection

from orchestrator.trial import Refused, Trial, read_answer


class ScriptedLeader:
    """Answers every rank the way the real one promises to, from lists given beforehand, and remembers the questions."""

    def __init__(self, verdicts: list[bool] | None = None, **values: float) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.values = values  # internal representations, as they travel
        self.verdicts = verdicts or []
        self.study: dict[str, Any] = {}

    def of_rank(self, rank: int) -> Any:
        leader = self

        class Line:
            def ask(self, op: str, **arguments: Any) -> Any:
                leader.asked.append((rank, op, *arguments.values()))
                if op == "suggest":
                    return leader.values[arguments["name"]]
                if op == "should_prune":
                    return leader.verdicts[arguments["call"]]
                if op == "study":
                    return read_answer(leader.study[arguments["what"]])
                return None

        return Line()

    def ops(self, op: str) -> list[tuple[Any, ...]]:
        return [question for question in self.asked if question[1] == op]


def job(rank: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "study_name": "digits",
        "directions": ["MAXIMIZE"],
        "number": 12,
        "params": {},
        "user_attrs": {},
        "datetime_start": None,
        "settings": {"epochs": 3},
        "rank": rank,
        "world_size": 2,
        "seed": 99,
        "num_cpus": 2,
        **changes,
    }


def trial_of(leader: ScriptedLeader, rank: int = 0, **changes: Any) -> Trial:
    return Trial(leader.of_rank(rank), job(rank, **changes), None, lambda: "cpu")  # type: ignore[arg-type]


def test_everything_of_optunas_trial_is_there():
    """Every public name of Optuna's Trial exists on ours, so that any Optuna objective runs."""
    ours = trial_of(ScriptedLeader())
    assert [name for name in dir(optuna.Trial) if not name.startswith("_") and not hasattr(ours, name)] == []
    assert isinstance(ours, optuna.trial.BaseTrial)


def test_facts():
    """Number, settings, seed, place in the gang and study are those of the job."""
    trial = trial_of(ScriptedLeader(), 1, user_attrs={"by": "me"}, datetime_start="2026-01-02T03:04:05.000006")
    assert (trial.number, trial.seed, trial.rank, trial.world_size, trial.num_cpus) == (12, 99, 1, 2, 2)
    assert trial.settings == {"epochs": 3}
    assert trial.device == "cpu"
    assert trial.user_attrs == {"by": "me"}
    assert trial.datetime_start == datetime(2026, 1, 2, 3, 4, 5, 6)
    assert trial_of(ScriptedLeader()).datetime_start is None


def test_a_value_is_asked_once():
    """A parameter is asked for at its first use on a rank, and remembered."""
    leader = ScriptedLeader(lr=0.1 + 0.2)
    trial = trial_of(leader)
    assert [trial.suggest_float("lr", 0, 1) for _ in range(3)] == [0.1 + 0.2] * 3
    assert len(leader.ops("suggest")) == 1
    assert trial.params == {"lr": 0.1 + 0.2}
    assert trial.distributions == {"lr": FloatDistribution(0, 1)}


def test_ranks_ask_in_any_order():
    """Each rank gets the leader's value, whatever it asks first and whatever the others leave out."""
    leader = ScriptedLeader(lr=0.25, width=64.0, act=1.0)
    zero, one = trial_of(leader, 0), trial_of(leader, 1)
    assert one.suggest_categorical("act", ["relu", "gelu"]) == "gelu"
    assert zero.suggest_float("lr", 0, 1) == one.suggest_float("lr", 0, 1) == 0.25
    assert zero.suggest_int("width", 1, 64) == 64
    assert type(zero.params["width"]) is int
    assert "width" not in one.params


def test_the_distribution_travels():
    """The leader hears exactly the distribution that the objective asked for."""
    leader = ScriptedLeader(a=1e-3, b=4.0, c=0.0, d=0.5, e=0.5, f=0.5)
    trial = trial_of(leader)
    trial.suggest_float("a", 1e-5, 1e-1, log=True)
    trial.suggest_int("b", 2, 8, step=2)
    trial.suggest_categorical("c", (None, True))
    trial.suggest_uniform("d", 0, 1)
    trial.suggest_loguniform("e", 0.1, 1)
    trial.suggest_discrete_uniform("f", 0, 1, 0.25)
    sent = [json_to_distribution(question[3]) for question in leader.ops("suggest")]
    assert sent == list(trial.distributions.values())
    assert sent[:2] == [FloatDistribution(1e-5, 1e-1, log=True), IntDistribution(2, 8, step=2)]


def test_another_kind_of_distribution():
    """A parameter that is asked for again as something else is the objective's error, as in Optuna."""
    trial = trial_of(ScriptedLeader(x=0.5))
    trial.suggest_float("x", 0, 1)
    with pytest.raises(ValueError, match="distribution"):
        trial.suggest_int("x", 0, 1)


def test_params_given_back():
    """Parameters that were suggested before a restart are there at once, exactly, and are not asked for again."""
    given = {
        "lr": [distribution_to_json(FloatDistribution(0, 1)), 0.1 + 0.2],
        "width": [distribution_to_json(IntDistribution(0, 2**53)), float(2**53 - 1)],
        "act": [distribution_to_json(optuna.distributions.CategoricalDistribution((None, "gelu"))), 0.0],
    }
    leader = ScriptedLeader()
    trial = trial_of(leader, params=given)
    assert trial.params == {"lr": 0.1 + 0.2, "width": 2**53 - 1, "act": None}
    assert trial.suggest_float("lr", 0, 1) == 0.1 + 0.2
    assert trial.suggest_int("width", 0, 2**53) == 2**53 - 1
    assert trial.suggest_categorical("act", [None, "gelu"]) is None
    assert leader.asked == []


def test_facts_are_copies():
    """What an objective does to `params` and `user_attrs` changes nothing of the trial."""
    trial = trial_of(ScriptedLeader(lr=0.5))
    trial.suggest_float("lr", 0, 1)
    trial.params.clear()
    trial.user_attrs["x"] = 1
    assert trial.params == {"lr": 0.5}
    assert trial.user_attrs == {}


@pytest.mark.parametrize("choices", [[None, True, 1, 2.5, "a"], ("a",), [float("inf"), 0]])
def test_choices_that_are_allowed(choices):
    """None, bool, int, float and str come back as they were."""
    for index, choice in enumerate(choices):
        found = trial_of(ScriptedLeader(c=float(index))).suggest_categorical("c", choices)
        assert found == choice
        assert type(found) is type(choice)


@pytest.mark.parametrize(
    "choice",
    [(1, 2), [1], {"a": 1}, {1}, b"x", object(), torch.float16, torch.nn.ReLU, 1j, len],
    ids=lambda choice: type(choice).__name__,
)
def test_choices_that_are_refused(choice):
    """Anything else is refused by name and type, and the leader never hears of it."""
    leader = ScriptedLeader(c=0.0)
    with pytest.raises(Refused, match="parameter 'c'") as refused:
        trial_of(leader).suggest_categorical("c", ["fine", choice])
    assert f"is a {type(choice).__name__}; choices can only be" in str(refused.value)
    assert leader.asked == []


def test_reports_of_rank_0_only():
    """Reports go to the leader from rank 0, and are accepted and ignored elsewhere."""
    leader = ScriptedLeader()
    trial_of(leader, 1).report(0.5, 1)
    assert leader.asked == []
    trial_of(leader, 0).report(0.5, 1)
    assert leader.asked == [(0, "report", 0.5, 1)]


@pytest.mark.parametrize("value", [1, True, "0.5", torch.tensor(0.5), torch.tensor([0.5]), math.inf, math.nan])
def test_values_that_are_floats(value):
    """What Optuna takes for a float arrives as one."""
    leader = ScriptedLeader()
    trial_of(leader).report(value, torch.tensor(3))  # type: ignore[arg-type]
    _, _, sent, step = leader.asked[0]
    assert sent == float(value) or math.isnan(sent)
    assert (type(sent), type(step), step) == (float, int, 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", [None, "high", [0.5], {}, 1j, torch.zeros(2)], ids=repr)
def test_values_that_are_none(rank, value):
    """Anything else is a TypeError that says so, on every rank."""
    leader = ScriptedLeader()
    with pytest.raises(TypeError, match=r"report\(value=\.\.\.\) takes a float"):
        trial_of(leader, rank).report(value, 1)
    assert leader.asked == []


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (None, TypeError),
        ("one", TypeError),
        ([1], TypeError),
        (2.5, ValueError),
        (-1, ValueError),
        (2**31, ValueError),
        (math.nan, (TypeError, ValueError)),
        (math.inf, (TypeError, ValueError)),
    ],
)
def test_steps_that_are_none(step, error):
    """A step is a whole number from 0 that fits 32 bits; anything else is refused (Optuna stores 2.5 as 2)."""
    leader = ScriptedLeader()
    with pytest.raises(error, match=r"report\(step="):
        trial_of(leader).report(0.5, step)
    assert leader.asked == []


def test_verdicts_are_matched_by_call():
    """The k-th should_prune() of any rank asks for rank 0's k-th verdict, however far the ranks are apart."""
    leader = ScriptedLeader(verdicts=[False, False, True])
    zero, one = trial_of(leader, 0), trial_of(leader, 1)
    assert [zero.should_prune() for _ in range(3)] == [False, False, True]
    assert [one.should_prune() for _ in range(3)] == [False, False, True]
    assert leader.ops("should_prune") == [(rank, "should_prune", k) for rank, k in itertools.product((0, 1), range(3))]


def test_attributes_and_constraints():
    """Attributes and constraints are remembered on every rank, and sent by rank 0."""
    leader = ScriptedLeader()
    for rank in (0, 1):
        trial = trial_of(leader, rank)
        trial.set_user_attr("curve", [1, 2])
        trial.set_constraint("memory", 3)
        assert trial.user_attrs == {"curve": [1, 2]}
        assert trial.constraints == {"memory": 3.0}
    assert leader.asked == [(0, "set_user_attr", "curve", [1, 2]), (0, "set_constraint", "memory", 3.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_attributes_that_json_cannot_hold(rank):
    """An attribute that JSON has no words for is a TypeError on every rank, and is not remembered."""
    trial = trial_of(ScriptedLeader(), rank)
    with pytest.raises(TypeError, match="JSON"):
        trial.set_user_attr("x", {1, 2})
    assert trial.user_attrs == {}


def test_the_study_an_objective_sees():
    """Name, directions, attributes, best value and parameters of the study are there, and it can be stopped."""
    leader = ScriptedLeader()
    leader.study = {"best_value": {"ok": 0.9}, "best_params": {"ok": {"lr": 0.1}}, "user_attrs": {"ok": {"a": 1}}}
    study = trial_of(leader).study
    assert (study.study_name, study.directions, study.direction) == ("digits", [StudyDirection.MAXIMIZE], 2)
    assert (study.best_value, study.best_params, study.user_attrs) == (0.9, {"lr": 0.1}, {"a": 1})
    study.set_user_attr("a", 2)
    study.stop()
    assert leader.asked[-2:] == [(0, "study_set_user_attr", "a", 2), (0, "study_stop")]


def test_the_best_value_of_nothing():
    """Without a complete trial `best_value` raises ValueError, as Optuna's does."""
    leader = ScriptedLeader()
    leader.study = {"best_value": {"error": "ValueError", "message": "No trials are completed yet."}}
    with pytest.raises(ValueError, match="No trials are completed"):
        _ = trial_of(leader).study.best_value


@pytest.mark.parametrize(
    "name", ["trials", "get_trials", "tell", "ask", "optimize", "enqueue_trial", "_storage", "sampler"]
)
def test_the_rest_of_the_study(name):
    """Anything else of the study is refused in one sentence that says what there is instead."""
    study = trial_of(ScriptedLeader()).study
    with pytest.raises(AttributeError, match=rf"^trial\.study\.{name} is not available while training: ") as refused:
        getattr(study, name)
    assert "\n" not in str(refused.value)
    assert not hasattr(study, name)


def test_one_direction_of_several():
    """`direction` of a study with several objectives points to `directions`."""
    study = trial_of(ScriptedLeader(), directions=["MINIMIZE", "MAXIMIZE"]).study
    assert study.directions == [StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE]
    with pytest.raises(RuntimeError, match=r"trial\.study\.directions"):
        _ = study.direction


@pytest.mark.parametrize(
    ("name", "error"),
    [("ValueError", ValueError), ("TypeError", TypeError), ("KeyError", KeyError), ("Other", Refused)],
)
def test_errors_of_the_leader(name, error):
    """What the leader refuses arrives as the named exception, or as Refused; nothing else can be made of it."""
    with pytest.raises(error, match="because"):
        read_answer({"error": name, "message": "because"})
    assert read_answer({"ok": None}) is None
