"""Who runs which trial, on a real database: take, settle, give back, adopt, delete."""

from __future__ import annotations

import math
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import optuna
import pytest
from optuna.trial import TrialState

from storage import Database, StorageError, StudyNotFound, attempts, studies
from storage.attempts import NotTaken
from tests.runs import wait_for

EXACT = {1: 0.1 + 0.2, 2: 5e-324, 3: math.nan, 4: math.inf, 5: -math.inf, 6: 1.7976931348623157e308, 7: 1 / 3}


def same(left: dict[int, float], right: dict[int, float]) -> bool:
    """Whether reported values are the same, NaN included."""
    return {step: repr(value) for step, value in left.items()} == {step: repr(value) for step, value in right.items()}


def test_numbers_come_in_order(shop):
    """Trials are numbered from 0 without gaps, RUNNING, owned by one open attempt each, with Optuna's own clock."""
    study = shop.create(n_trials=5)
    taken = [shop.take(study) for _ in range(5)]
    assert [t.number for t in taken] == [0, 1, 2, 3, 4]
    assert [t.log_path for t in taken] == [f"/logs/{number}" for number in range(5)]
    assert {t.token for t in taken} == {a.token for a in attempts.open_of_study(shop.database, study.study_id)}
    plain = shop.optuna()
    theirs = plain.ask()
    assert [trial.state for trial in plain.trials] == [TrialState.RUNNING] * 6
    assert abs((plain.trials[0].datetime_start - plain.trials[theirs.number].datetime_start).total_seconds()) < 60


def test_the_attempt_says_who(shop):
    """An attempt keeps its owner, and how and when it ended."""
    study = shop.create()
    taken = shop.take(study)
    shop.settle(taken, "FAIL", None, "error")
    (attempt,) = shop.attempts(study)
    assert (attempt.worker, attempt.host, attempt.pid, attempt.gpus) == ("test/0", "host", 1, ["GPU-1"])
    assert (attempt.number, attempt.end_reason, attempt.log_path) == (0, "error", "/logs/0")
    assert attempt.started_at < attempt.ended_at


def test_the_budget_is_exact_under_contention(shop):
    """Eight threads that take, settle and give back at once end exactly n_trials trials, numbered without gaps."""
    study = shop.create(n_trials=25)
    start = threading.Barrier(8)

    def work(worker: int) -> int:
        database = Database(shop.url)
        settled = turn = 0
        start.wait()
        while (taken := shop.try_take(study, database=database)) is not NotTaken.DONE:
            turn += 1
            if taken is NotTaken.BUSY:
                continue
            if turn % 4 == 0:
                assert attempts.give_back(database, taken.token, "drained")
                continue
            state = ("COMPLETE", "PRUNED", "FAIL")[(worker + turn) % 3]
            reason = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "error"}[state]
            assert attempts.settle(database, taken.token, state, [1.0] if state == "COMPLETE" else None, reason)
            settled += 1
        database.close()
        return settled

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 25
    trials = shop.optuna().trials
    assert [trial.number for trial in trials] == list(range(25))
    assert all(trial.state.is_finished() for trial in trials)
    assert attempts.open_of_study(shop.database, study.study_id) == []


@pytest.mark.parametrize(
    ("reason", "counts"),
    [("error", True), ("oom", True), ("timeout", True), ("stalled", True), ("lost", False), ("crash", False)],
)
def test_failures_that_count(shop, reason, counts):
    """A trial that failed by its own fault is part of the budget; one that the infrastructure lost is not."""
    study = shop.create(n_trials=1)
    shop.settle(shop.take(study), "FAIL", None, reason)
    again = shop.try_take(study)
    assert again is NotTaken.DONE if counts else again.number == 1


def test_enqueued_trials_come_first(shop):
    """What optuna's enqueue_trial queued is taken before anything new, in order, and counts when it is taken."""
    study = shop.create(n_trials=2)
    plain = shop.optuna()
    for lr in (0.25, 0.5, 0.75):
        plain.enqueue_trial({"lr": lr})
    first, second = shop.take(study), shop.take(study)
    assert [optuna.Trial(plain, t.trial_id).suggest_float("lr", 0, 1) for t in (first, second)] == [0.25, 0.5]
    assert shop.try_take(study) is NotTaken.BUSY
    shop.settle(first)
    shop.settle(second)
    assert shop.try_take(study) is NotTaken.DONE
    assert plain.get_trials(deepcopy=False)[2].state == TrialState.WAITING


def test_trials_of_plain_scripts_count_once_finished(shop):
    """A plain Optuna script on the same study spends the budget with every trial that it finishes."""
    study = shop.create(n_trials=2)
    plain = shop.optuna()
    running = plain.ask()
    plain.tell(plain.ask(), 1.0)
    mine = shop.take(study)
    assert mine.number == 2
    assert shop.try_take(study) is NotTaken.BUSY
    shop.settle(mine)
    assert shop.try_take(study) is NotTaken.DONE
    assert plain.tell(running, 2.0).value == 2.0


def test_a_repeated_take_finds_its_attempt(shop):
    """A take that is repeated with its token, after a lost answer, gives the same trial and opens nothing new."""
    study = shop.create(n_trials=3)
    token = uuid.uuid4()
    assert shop.take(study, token) == shop.take(study, token)
    assert len(shop.optuna().trials) == len(shop.attempts(study)) == 1


def test_the_states_of_a_study(shop):
    """Paused, stopped, busy and done studies give no trial, and say which they are."""
    study = shop.create(n_trials=1)
    for desired, answer in (("paused", NotTaken.PAUSED), ("stopped", NotTaken.STOPPED)):
        studies.set_desired(shop.database, study.study_id, desired)
        assert shop.try_take(study) is answer
    studies.set_desired(shop.database, study.study_id, "active")
    taken = shop.take(study)
    assert shop.try_take(study) is NotTaken.BUSY
    shop.settle(taken)
    assert shop.try_take(study) is NotTaken.DONE
    assert len(shop.optuna().trials) == 1


def test_a_study_that_is_gone(shop):
    """Taking from a study that was deleted, or that has no definition, is StudyNotFound."""
    study = shop.create()
    studies.delete(shop.database, study.study_id)
    with pytest.raises(StudyNotFound):
        shop.try_take(study)
    shop.optuna_create("plain")
    with pytest.raises(StudyNotFound):
        shop.try_take(studies.get(shop.database, "plain"))


SETTLED = {
    "complete": ("COMPLETE", [0.1 + 0.2]),
    "infinite": ("COMPLETE", [math.inf]),
    "minus infinite": ("COMPLETE", [-math.inf]),
    "pruned": ("PRUNED", [5e-324]),
    "pruned at inf": ("PRUNED", [math.inf]),
    "pruned without reports": ("PRUNED", None),
    "failed": ("FAIL", None),
}


@pytest.mark.parametrize("case", SETTLED)
def test_settle_writes_what_optuna_writes(shop, case):
    """A settled trial is the same FrozenTrial that Optuna's own tell leaves in a second study."""
    state, values = SETTLED[case]
    mine, theirs = shop.create("mine"), shop.optuna_create("theirs", sampler=optuna.samplers.RandomSampler(seed=1))
    taken = shop.take(mine)
    study = shop.optuna("mine", sampler=optuna.samplers.RandomSampler(seed=1))
    assert len(study.trials) == 1  # Optuna's cache has to know a trial before it takes parameters
    for trial in (optuna.Trial(study, taken.trial_id), theirs.ask()):
        trial.suggest_float("lr", 1e-5, 1.0, log=True)
        trial.suggest_categorical("act", [None, "gelu"])
        trial.set_user_attr("by", "me")
        if case != "pruned without reports":
            trial.report(values[0] if values else 0.5, 3)
            trial.report(0.75, 2)
    theirs.tell(0, values if state == "COMPLETE" else None, TrialState[state])
    assert shop.settle(taken, state, values)
    one, other = shop.optuna("mine").trials[0], shop.optuna("theirs").trials[0]
    assert abs((one.datetime_complete - other.datetime_complete).total_seconds()) < 60
    for trial in (one, other):
        trial._trial_id = trial.datetime_start = trial.datetime_complete = None
    assert one == other


def test_settle_of_several_objectives(shop):
    """Each objective's value is kept in its place."""
    study = shop.create(directions=["MINIMIZE", "MAXIMIZE"])
    shop.settle(shop.take(study), "COMPLETE", [0.25, -math.inf])
    plain = shop.optuna()
    assert plain.trials[0].values == [0.25, -math.inf]
    assert [direction.name for direction in plain.directions] == ["MINIMIZE", "MAXIMIZE"]


def test_a_trial_that_became_nan(shop):
    """A diverged trial is PRUNED without value and reports, to be ranked last; its attempt keeps the reports."""
    study = shop.create()
    taken = shop.take(study)
    optuna.Trial(shop.optuna(), taken.trial_id).report(math.nan, 1)
    assert shop.settle(taken, "PRUNED", None, "nan")
    trial = shop.optuna().trials[0]
    assert (trial.state, trial.values, trial.intermediate_values) == (TrialState.PRUNED, None, {})
    (row,) = shop.rows("SELECT taken_off FROM orch.attempts")
    assert row["taken_off"] == {"1": {"type": "NAN", "value": None}}


def test_a_failed_trial_does_not_judge_others(shop):
    """The rung marks of a trial that fails go with it; its reports stay for people."""
    study = shop.create()
    taken = shop.take(study)
    trial = optuna.Trial(shop.optuna(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1)), taken.trial_id)
    trial.report(0.5, 1)
    trial.should_prune()
    assert "completed_rung_0" in shop.optuna().trials[0].system_attrs
    shop.settle(taken, "FAIL", None, "error")
    assert shop.optuna().trials[0].system_attrs == {}
    assert shop.optuna().trials[0].intermediate_values == {1: 0.5}


def test_a_token_that_lost_its_trial_writes_nothing(shop):
    """After a give-back the old token can neither settle, give back nor record a checkpoint, also once retaken."""
    study = shop.create()
    old = shop.take(study)
    assert attempts.give_back(shop.database, old.token, "lost")
    for _ in range(2):
        assert not shop.settle(old)
        assert not attempts.give_back(shop.database, old.token, "drained")
        assert not attempts.record_checkpoint(shop.database, old.token, 1, "/c")
        assert shop.optuna().trials[0].values is None
        new = shop.try_take(study)
    assert [(a.end_reason, a.checkpoint_step) for a in shop.attempts(study, 0)] == [("lost", None), (None, None)]
    assert new.number == 1


@pytest.mark.parametrize("state", ["FAIL", "COMPLETE"])
def test_a_trial_that_was_ended_from_outside(shop, state):
    """What the dashboard or a script made of a running trial stays; its owner learns of it, and is `cancelled`."""
    study = shop.create(n_trials=1)
    taken = shop.take(study)
    plain = shop.optuna()
    plain._storage.set_trial_state_values(taken.trial_id, TrialState[state], [0.5] if state == "COMPLETE" else None)
    assert not shop.settle(taken, "COMPLETE", [9.0])
    trial = shop.optuna().trials[0]
    assert (trial.state.name, trial.values) == (state, [0.5] if state == "COMPLETE" else None)
    assert [a.end_reason for a in shop.attempts(study)] == ["cancelled"]
    assert shop.try_take(study) is NotTaken.DONE


def test_marks_of_a_trial_that_was_completed_from_outside(shop):
    """An owner that fails after its trial was completed from outside leaves the trial's rung marks alone, too."""
    taken = shop.take(shop.create())
    plain = shop.optuna()
    plain._storage.set_trial_system_attr(taken.trial_id, "completed_rung_0", 0.5)
    plain._storage.set_trial_state_values(taken.trial_id, TrialState.COMPLETE, [0.5])
    assert not shop.settle(taken, "FAIL", None, "error")
    assert shop.optuna().trials[0].system_attrs == {"completed_rung_0": 0.5}


def given_back(shop, study, checkpoint_step: int | None = None):
    """A trial with parameters, exact values and a rung mark that was given back."""
    taken = shop.take(study)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1)
    trial = optuna.Trial(shop.optuna(study.name, pruner=pruner), taken.trial_id)
    trial.suggest_float("lr", 0, 1)
    trial.set_user_attr("by", "me")
    for step, value in EXACT.items():
        trial.report(value, step)
        if step == 1:
            trial.should_prune()
    before = shop.optuna(study.name).trials[taken.number]
    assert "completed_rung_0" in before.system_attrs
    if checkpoint_step is not None:
        assert attempts.record_checkpoint(shop.database, taken.token, checkpoint_step, f"/step-{checkpoint_step}")
    assert attempts.give_back(shop.database, taken.token, "drained")
    return before


def test_give_back_leaves_a_clean_row(shop):
    """A trial given back waits on its row with number, parameters and attributes; reports and rung marks are off it."""
    study = shop.create()
    before = given_back(shop, study)
    after = shop.optuna().trials[0]
    assert (after.state, after.number, after.params) == (TrialState.WAITING, 0, before.params)
    assert (after.user_attrs, after.system_attrs, after.intermediate_values) == ({"by": "me"}, {}, {})
    (row,) = shop.rows("SELECT taken_off FROM orch.attempts")
    assert sorted(map(int, row["taken_off"])) == list(EXACT)
    assert [a.end_reason for a in shop.attempts(study)] == ["drained"]


def test_a_plain_script_pops_it_clean(shop):
    """A plain `study.ask()` gets the trial that was given back as if it had only been suggested, and can finish it."""
    study = shop.create(n_trials=1)
    before = given_back(shop, study, checkpoint_step=5)
    plain = shop.optuna()
    trial = plain.ask()
    assert (trial.number, trial.params) == (0, before.params)
    assert plain.trials[0].intermediate_values == {}
    trial.report(99.0, 1)
    plain.tell(trial, 2.0)
    assert shop.try_take(study) is NotTaken.DONE
    assert shop.optuna().trials[0].intermediate_values == {1: 99.0}


@pytest.mark.parametrize("step", [None, 0, 4, 7, 100])
def test_the_next_take_puts_back_up_to_the_checkpoint(shop, step):
    """The next owner finds the checkpoint and exactly the values up to its step, NaN and infinities included."""
    study = shop.create(n_trials=1)
    before = given_back(shop, study, step)
    taken = shop.take(study)
    assert (taken.number, taken.checkpoint_step) == (0, step)
    assert taken.checkpoint_path == (None if step is None else f"/step-{step}")
    after = shop.optuna().trials[0]
    assert (after.state, after.params) == (TrialState.RUNNING, before.params)
    assert same(after.intermediate_values, {k: v for k, v in EXACT.items() if step is not None and k <= step})
    assert "completed_rung_0" not in after.system_attrs


def test_the_latest_attempt_wins(shop):
    """A step that was reported by several attempts has the value of the latest; its checkpoint is the newest step."""
    study = shop.create()
    given_back(shop, study, checkpoint_step=2)
    second = shop.take(study)
    trial = optuna.Trial(shop.optuna(), second.trial_id)
    trial.report(3.5, 3)
    attempts.record_checkpoint(shop.database, second.token, 3, "/second")
    trial.report(4.5, 4)
    attempts.give_back(shop.database, second.token, "lost")
    third = shop.take(study)
    assert (third.checkpoint_step, third.checkpoint_path) == (3, "/second")
    assert shop.optuna().trials[0].intermediate_values == {1: EXACT[1], 2: EXACT[2], 3: 3.5}


def test_given_back_trials_go_first(shop):
    """A trial given back is taken before enqueued and new ones, and within its budget although that is spent."""
    study = shop.create(n_trials=2)
    shop.optuna().enqueue_trial({"lr": 0.5})
    first, second = shop.take(study), shop.take(study)
    shop.settle(first)
    attempts.give_back(shop.database, second.token, "lost")
    assert shop.take(study).number == 1
    assert shop.try_take(study) is NotTaken.BUSY


def test_a_row_that_a_script_used_in_between(shop):
    """A trial given back that a plain script popped, reported to and put back can be taken: its values do not clash."""
    study = shop.create()
    given_back(shop, study, checkpoint_step=5)
    plain = shop.optuna()
    trial = plain.ask()
    trial.report(8.0, 2)
    plain._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    assert shop.take(study).number == 0


@pytest.mark.parametrize("count_existing", [False, True])
def test_adoption(shop, count_existing):
    """A study that was Optuna's gets a definition once; its finished trials are history unless they shall count."""
    plain = shop.optuna_create("old", direction="maximize")
    for value in (1.0, 2.0):
        plain.tell(plain.ask(), value)
    plain.tell(plain.ask(), state=TrialState.FAIL)
    record = studies.adopt(shop.database, "old", {"name": "old"}, {}, 4, count_existing=count_existing)
    assert (record.directions, record.spec) == (("MAXIMIZE",), {"name": "old"})
    with pytest.raises(StorageError, match="has a definition already"):
        studies.adopt(shop.database, "old", {}, {}, 4, count_existing=True)
    room = 0
    while not isinstance(taken := shop.try_take(record), NotTaken):
        shop.settle(taken)
        room += 1
    assert room == (1 if count_existing else 4)


def test_adoption_of_nothing(shop):
    """Adopting a study that is not there names the nearest one."""
    shop.create("digits")
    with pytest.raises(StudyNotFound, match="did you mean 'digits'"):
        studies.adopt(shop.database, "digit", {}, {}, 4, count_existing=True)


def everything(shop, name: str):
    """A study with rows in every table that has any."""
    study = shop.create(name)
    given_back(shop, study, checkpoint_step=3)
    plain = shop.optuna(name, pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1))
    plain.set_user_attr("a", 1)
    plain._storage.set_study_system_attr(plain._study_id, "b", 1)
    taken = shop.take(study)
    trial = optuna.Trial(plain, taken.trial_id)
    trial.report(0.5, 20)
    trial.should_prune()
    plain._storage._backend.record_heartbeat(taken.trial_id)
    shop.settle(taken)
    shop.take(study)
    return study


def count_rows(shop) -> dict[str, int]:
    """How many rows each table of studies and trials has."""
    tables = shop.rows(
        "SELECT DISTINCT table_schema || '.' || table_name AS name FROM information_schema.columns"
        " WHERE column_name IN ('study_id', 'trial_id') AND table_schema IN ('public', 'orch')"
    )
    return {table["name"]: shop.rows(f"SELECT count(*) AS n FROM {table['name']}")[0]["n"] for table in tables}


def test_deletion_is_complete(shop):
    """Deleting a study removes its rows from every table there is, and nothing of another study."""
    everything(shop, "kept")
    kept = count_rows(shop)
    assert all(kept.values()), kept
    gone = everything(shop, "gone")
    assert all(n > kept[table] for table, n in count_rows(shop).items())
    studies.delete(shop.database, gone.study_id)
    studies.delete(shop.database, gone.study_id)
    assert count_rows(shop) == kept
    assert studies.find(shop.database, "gone") is None
    assert len(shop.optuna("kept").trials) == 2


def test_deletion_while_a_worker_settles(shop):
    """A worker that holds its attempt while the study is deleted finishes first: neither of the two fails."""
    study = shop.create()
    taken = shop.take(study)
    database = Database(shop.url)
    with ThreadPoolExecutor(1) as pool:
        with shop.database.transaction() as tx:
            assert tx.one(attempts.SQL["lock_attempt"], {"token": taken.token})
            deleted = pool.submit(studies.delete, database, study.study_id)
            wait_for(lambda: shop.blocked() == 1, "the deletion waits")
            assert tx.one(attempts.SQL["finish_trial"], {"trial_id": taken.trial_id, "state": "COMPLETE"})
        deleted.result()
    database.close()
    assert not any(count_rows(shop).values())


def test_deletion_while_scripts_write(shop):
    """Workers and scripts that write while their study is deleted find it gone, and leave no row behind."""
    study = shop.create()
    storages = [shop.optuna() for _ in range(3)]
    writing = threading.Barrier(5)

    def script(plain) -> None:
        trial = plain.ask()
        writing.wait()
        for step in range(100_000):
            trial.report(1.0, step)
            trial.set_user_attr(f"key{step}", step)

    def worker() -> None:
        database = Database(shop.url)
        writing.wait()
        try:
            while True:
                taken = shop.take(study, database=database)
                attempts.record_checkpoint(database, taken.token, 1, "/c")
                attempts.settle(database, taken.token, "COMPLETE", [1.0], "done")
        finally:
            database.close()

    with ThreadPoolExecutor(4) as pool:
        scripts = [pool.submit(script, plain) for plain in storages]
        mine = pool.submit(worker)
        writing.wait()
        studies.delete(shop.database, study.study_id)
        assert isinstance(mine.exception(), StudyNotFound), mine.exception()
        assert all(isinstance(done.exception(), Exception) for done in scripts)
    assert not any(count_rows(shop).values())
