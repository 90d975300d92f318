"""What orch relies on in Optuna: facts and private names, so that an upgrade that changes one is noticed here."""

from __future__ import annotations

import math
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optuna
import pytest
from optuna.distributions import IntDistribution, distribution_to_json
from optuna.pruners import HyperbandPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState

from orchestrator import search, spec
from orchestrator.launcher import Outcome
from orchestrator.leader import TrialLeader, after_trial
from orchestrator.session import StudySession
from storage import attempts, studies
from storage.attempts import Owner
from tests.runs import wait_for

X = distribution_to_json(IntDistribution(0, 1))


@pytest.fixture
def session_of(shop, tmp_path):
    """Open a session on a new study with the given definition."""
    sessions = []

    def session_of(**values: Any) -> StudySession:
        given = {"name": "s", "objective": "f.py:objective", "seed": 1, "max_steps": 9, **values}
        definition = spec.parse(given)
        directions = [word.upper() for word in definition.directions]
        assert studies.create(shop.database, "s", directions, definition.to_json(), {}, definition.n_trials)
        sessions.append(StudySession(shop.url, "s", str(tmp_path / "logs"), str(tmp_path / "checkpoints")))
        return sessions[-1]

    yield session_of
    for session in sessions:
        session.close()
        session.study._storage._backend.engine.dispose()


def take(session: StudySession) -> TrialLeader:
    leader = session.take(Owner("w", "h", 1, "boot/1/1/1"))
    assert isinstance(leader, TrialLeader)
    return leader


def ask(leader: TrialLeader, op: str, **arguments: Any) -> Any:
    reply = leader.answer(0, {"op": op, **arguments})
    assert reply is not None
    assert "error" not in reply, reply
    return reply["ok"]


def test_private_names():
    """The private names that orch uses are there."""
    study = optuna.create_study()
    trial = study.ask()
    assert hasattr(study._thread_local, "cached_all_trials")
    assert study._thread_local.in_optimize_loop is False
    assert isinstance(study._study_id, int)
    assert study._storage.get_trial(trial._trial_id).number == 0
    assert trial._cached_frozen_trial.number == 0
    assert trial._suggest("x", IntDistribution(3, 3)) == 3
    assert trial._cached_frozen_trial.params == {"x": 3}
    assert optuna.pruners._filter_study(study, trial._cached_frozen_trial) is study


def test_the_cached_frozen_trial_follows():
    """A Trial's own frozen trial has what was suggested, reported and attached through it."""
    trial = optuna.create_study().ask()
    trial.report(0.5, 3)
    trial.set_user_attr("a", 1)
    frozen = trial._cached_frozen_trial
    assert (frozen.intermediate_values, frozen.last_step, frozen.user_attrs) == ({3: 0.5}, 3, {"a": 1})


@pytest.mark.parametrize("max_steps", [9, 27, 81])
def test_bracket_from_name_and_number(max_steps):
    """Fact 4: a trial's bracket follows from crc32 of "{study name}_{number}" alone."""
    pruner = HyperbandPruner(min_resource=1, max_resource=max_steps, reduction_factor=3)
    study = optuna.create_study(study_name="digits", pruner=pruner)
    trial = study.ask()
    trial.report(1.0, 1)
    trial.should_prune()
    brackets = []
    for number in range(50):
        n = zlib.crc32(f"digits_{number}".encode()) % sum(pruner._trial_allocation_budgets)
        bracket = 0
        while n >= pruner._trial_allocation_budgets[bracket]:
            n -= pruner._trial_allocation_budgets[bracket]
            bracket += 1
        frozen = optuna.trial.create_trial(value=0.0)
        frozen.number = number
        assert pruner._get_bracket_id(study, frozen) == bracket
        brackets.append(bracket)
    assert len(set(brackets)) == len(pruner._pruners)


def test_a_seeded_sampler_repeats_itself():
    """Fact 10: samplers with one seed propose the same first trial, which is why orch seeds by trial number."""
    first = [
        optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1)).ask().suggest_float("x", 0, 1) for _ in "ab"
    ]
    assert first[0] == first[1]


def test_rung_marks():
    """Fact 14: rungs are the system attributes completed_rung_k, and those of failed trials keep competing."""
    study = optuna.create_study(pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=2))
    for _ in range(3):
        good = study.ask()
        good.report(0.1, 1)
        good.should_prune()
        assert study.trials[good.number].system_attrs == {"completed_rung_0": 0.1}
        study.tell(good, state=TrialState.FAIL)
    healthy = study.ask()
    healthy.report(0.2, 1)
    assert healthy.should_prune()


def test_the_last_report_prunes_in_optuna():
    """Fact 16: in Optuna, a trial that used its whole budget can be pruned by its last report."""
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    trial = study.ask()
    trial.report(5.0, 9)
    assert trial.should_prune()


def test_the_last_report_does_not_prune_in_orch(session_of):
    """A trial that has reported max_steps is complete: the leader never prunes it by its last report."""
    leader = take(session_of(pruner="threshold:upper=1.0", max_steps=9))
    ask(leader, "report", value=0.5, step=8)
    assert ask(leader, "should_prune", call=0) is False
    ask(leader, "report", value=5.0, step=9)
    assert ask(leader, "should_prune", call=1) is False


def test_earlier_reports_do_prune_in_orch(session_of):
    """The same value one step earlier prunes, and a NaN prunes at once under every pruner."""
    session = session_of(pruner="threshold:upper=1.0", max_steps=9)
    leader = take(session)
    ask(leader, "report", value=5.0, step=8)
    assert ask(leader, "should_prune", call=0) is True
    leader = take(session)
    ask(leader, "report", value=float("nan"), step=3)
    assert ask(leader, "should_prune", call=0) is True
    event = session.settle(leader, Outcome("pruned"))
    assert (event["state"], event["reason"]) == ("PRUNED", "nan")


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("pruner", ["asha:reduction_factor=2", "median:n_startup_trials=1"])
def test_an_infinite_report_judges_nobody(session_of, direction, pruner):
    """Whatever infinities another trial has reported, a trial that is otherwise alone is not pruned."""
    session = session_of(direction=direction, pruner=pruner)
    for sign in (1, -1):
        leader = take(session)
        ask(leader, "report", value=sign * math.inf, step=1)
        ask(leader, "should_prune", call=0)
        session.settle(leader, Outcome("complete", (0.0,)))
    leader = take(session)
    ask(leader, "report", value=0.9, step=1)
    assert ask(leader, "should_prune", call=0) is False


def test_a_waiting_row_keeps_what_it_has(shop):
    """Facts 24, 33: RUNNING to WAITING is allowed, and `ask` pops the row with its values and rung marks."""
    plain = shop.optuna_create("s", pruner=SuccessiveHalvingPruner(min_resource=1, reduction_factor=2))
    trial = plain.ask()
    trial.suggest_float("x", 0, 1)
    trial.report(0.1, 1)
    trial.should_prune()
    plain._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    again = plain.ask()
    assert (again.number, again.params) == (0, trial.params)
    assert plain.trials[0].intermediate_values == {1: 0.1}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        again.report(99.0, 1)
    assert plain.trials[0].intermediate_values == {1: 0.1}
    assert "completed_rung_0" in plain.trials[0].system_attrs


def test_the_thread_local_list_of_trials():
    """Fact 30: a Trial built by hand sees the first list of trials of its thread until that is reset."""
    study = optuna.create_study()
    optuna.Trial(study, study._storage.create_new_trial(study._study_id)).suggest_float("x", 0, 1)
    first = study._get_trials(deepcopy=False, use_cache=True)
    study.add_trial(optuna.create_trial(value=1.0))
    optuna.Trial(study, study._storage.create_new_trial(study._study_id))
    assert len(study._get_trials(deepcopy=False, use_cache=True)) == len(first) == 1
    study._thread_local.cached_all_trials = None
    assert len(study._get_trials(deepcopy=False, use_cache=True)) == 3


def test_the_leader_sees_new_trials(session_of, shop):
    """A leader, in whichever thread its questions arrive, samples from the list of trials as it is then."""
    session = session_of(pruner="none")
    seen: list[int] = []

    class Counting(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, name, distribution):
            seen.append(len(study._get_trials(deepcopy=False, use_cache=True)))
            return super().sample_independent(study, trial, name, distribution)

    plain = shop.optuna()
    with ThreadPoolExecutor(1) as another_thread:
        for _ in range(2):
            plain.tell(plain.ask(), 1.0)
            leader = take(session)
            session.study.sampler = Counting()
            another_thread.submit(ask, leader, "suggest", name="x", distribution=X).result()
            ask(leader, "suggest", name="y", distribution=X)
    assert seen == [2, 2, 4, 4]


def brute_force() -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls it experimental
        return optuna.samplers.BruteForceSampler(seed=1)


def grid_study() -> optuna.Study:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [0, 1]}, seed=1))
    for _ in range(2):
        trial = study.ask()
        trial.suggest_int("x", 0, 1)
        if trial.number == 0:
            study.tell(trial, 1.0)
    return study


def test_grid_stops_outside_optimize():
    """Fact 31: grid and brute force call study.stop() at their last point, which raises outside `optimize`."""
    study = grid_study()
    with pytest.raises(RuntimeError, match=r"Study\.stop"):
        study.tell(1, 1.0)
    tree = optuna.create_study(sampler=brute_force())
    trial = tree.ask()
    trial.suggest_int("x", 0, 0)
    with pytest.raises(RuntimeError, match=r"Study\.stop"):
        tree.tell(trial, 1.0)


def test_after_trial_works_around_it():
    """The leader's after_trial lets the last point of a grid be settled, and leaves the study as it was."""
    study = grid_study()
    after_trial(study, study.trials[1], TrialState.COMPLETE, [1.0])
    assert study._thread_local.in_optimize_loop is False
    study.sampler = brute_force()
    after_trial(study, study.trials[1], TrialState.COMPLETE, [1.0])


@pytest.mark.parametrize("name", search.SAMPLERS)
def test_every_sampler_works_through_the_leader(session_of, name):
    """A study with any sampler runs two trials on PostgreSQL: suggested, reported, judged, settled."""
    options = {"search_space": {"x": [0, 1]}} if name == "grid" else {}
    session = session_of(sampler={"name": name, **options}, n_trials=2)
    for number in range(2):
        leader = take(session)
        x = ask(leader, "suggest", name="x", distribution=X)
        assert x == ask(leader, "suggest", name="x", distribution=X)
        ask(leader, "report", value=x, step=1)
        ask(leader, "should_prune", call=0)
        event = session.settle(leader, Outcome("complete", (x,)))
        assert (event["state"], event["trial"], event["value"]) == ("COMPLETE", number, x)


def test_tables_of_the_queries(shop):
    """The tables and columns of Optuna's that storage/queries use are those of the installed Optuna."""
    used = {
        "studies": {"study_id", "study_name"},
        "study_directions": {"direction", "study_id", "objective"},
        "study_user_attributes": {"study_id"},
        "study_system_attributes": {"study_id"},
        "trials": {"trial_id", "number", "study_id", "state", "datetime_start", "datetime_complete"},
        "trial_user_attributes": {"trial_id"},
        "trial_system_attributes": {"trial_id", "key"},
        "trial_params": {"trial_id"},
        "trial_values": {"trial_id", "objective", "value", "value_type"},
        "trial_intermediate_values": {"trial_id", "step", "intermediate_value", "intermediate_value_type"},
        "trial_heartbeats": {"trial_id"},
    }
    rows = shop.rows("SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'")
    columns: dict[str, set[str]] = {}
    for row in rows:
        columns.setdefault(row["table_name"], set()).add(row["column_name"])
    assert {table: names - columns.get(table, set()) for table, names in used.items()} == {
        table: set() for table in used
    }
    with_an_owner = {table for table, names in columns.items() if names & {"study_id", "trial_id"}}
    assert with_an_owner == set(used), "a new table of Optuna's must be deleted with its study too"


def test_types_of_the_queries(shop):
    """Optuna's enum types have the names and words that storage/queries write, and its times are naive."""
    rows = shop.rows("SELECT t.typname, e.enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid")
    enums: dict[str, set[str]] = {}
    for row in rows:
        enums.setdefault(row["typname"], set()).add(row["enumlabel"])
    assert enums["trialintermediatevaluetype"] == {"FINITE", "INF_POS", "INF_NEG", "NAN"}
    assert enums["trialvaluetype"] == {"FINITE", "INF_POS", "INF_NEG"}
    assert enums["trialstate"] == {"RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING"}
    assert {"MINIMIZE", "MAXIMIZE"} <= enums["studydirection"]
    times = shop.rows(
        "SELECT data_type FROM information_schema.columns WHERE table_name = 'trials' AND column_name LIKE 'date%'"
    )
    assert {row["data_type"] for row in times} == {"timestamp without time zone"}


def test_a_new_trial_takes_the_study_row(shop):
    """Optuna's create_new_trial locks the study row: no plain script adds a trial while a take counts the budget."""
    study = shop.create()
    plain = shop.optuna()
    with shop.database.transaction() as tx:
        tx.one(attempts.SQL["lock_study"], {"study_id": study.study_id})
        asking = threading.Thread(target=plain.ask)
        asking.start()
        wait_for(shop.blocked, "the script waits for the study row", 20.0)
    asking.join()
    assert len(plain.trials) == 1


def test_writes_to_a_finished_trial(session_of, shop):
    """Fact 25: writes to a finished trial raise UpdateFinishedTrialError, which ends the trainer."""
    leader = take(session_of())
    plain = shop.optuna()
    plain._storage.set_trial_state_values(leader.taken.trial_id, TrialState.FAIL)
    assert leader.answer(0, {"op": "report", "value": 1.0, "step": 1}) is None
    assert leader.answer(0, {"op": "set_user_attr", "key": "a", "value": 1}) is None
    assert leader.answer(0, {"op": "suggest", "name": "x", "distribution": X}) is None
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        plain._storage.set_trial_intermediate_value(leader.taken.trial_id, 1, 1.0)
