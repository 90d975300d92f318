-- name: lock_study
-- The study row serialises all takes of a study, ours and Optuna's own (its create_new_trial locks the same row).
SELECT study_id FROM studies WHERE study_id = %(study_id)s FOR UPDATE

-- name: control
-- What the study's control row allows, and how much of the budget is spoken for. A FAIL that the infrastructure
-- caused does not count; a row that was given back still belongs to the budget it was taken under.
SELECT s.desired, s.n_trials, s.n_history,
       (SELECT count(*) FROM trials t
         WHERE t.study_id = s.study_id
           AND (t.state IN ('COMPLETE', 'PRUNED')
                OR t.state = 'FAIL' AND coalesce((
                    SELECT a.end_reason FROM orch.attempts a WHERE a.trial_id = t.trial_id
                     ORDER BY a.started_at DESC LIMIT 1), 'error') NOT IN ('lost', 'crash')))
           AS finished,
       (SELECT count(*) FROM trials t
         WHERE t.study_id = s.study_id
           AND (t.state = 'RUNNING' AND EXISTS (
                    SELECT 1 FROM orch.attempts a WHERE a.trial_id = t.trial_id AND a.ended_at IS NULL)
                OR t.state = 'WAITING' AND EXISTS (SELECT 1 FROM orch.attempts a WHERE a.trial_id = t.trial_id)))
           AS under_way
  FROM orch.specs s
 WHERE s.study_id = %(study_id)s

-- name: find_attempt
-- A take that is repeated after a lost answer finds the attempt it already opened.
SELECT t.trial_id, t.number
  FROM orch.attempts a JOIN trials t USING (trial_id)
 WHERE a.token = %(token)s AND a.ended_at IS NULL

-- name: waiting
-- The next WAITING trial: those given back first, then in the order they were enqueued.
SELECT t.trial_id, t.number, EXISTS (SELECT 1 FROM orch.attempts a WHERE a.trial_id = t.trial_id) AS given_back
  FROM trials t
 WHERE t.study_id = %(study_id)s AND t.state = 'WAITING'
 ORDER BY given_back DESC, t.trial_id
 LIMIT 1
   FOR UPDATE OF t SKIP LOCKED

-- name: start_waiting
-- A waiting trial starts; Optuna's columns hold naive UTC.
UPDATE trials SET state = 'RUNNING', datetime_start = timezone('utc', clock_timestamp())
 WHERE trial_id = %(trial_id)s

-- name: new_trial
-- A new trial with the next number; exact because the study row is locked.
INSERT INTO trials (number, study_id, state, datetime_start)
SELECT coalesce(max(number) + 1, 0), %(study_id)s, 'RUNNING', timezone('utc', clock_timestamp())
  FROM trials WHERE study_id = %(study_id)s
RETURNING trial_id, number

-- name: open_attempt
-- The attempt is the lease on the trial.
INSERT INTO orch.attempts (token, trial_id, worker, host, pid, process, gpus, log_path)
VALUES (%(token)s, %(trial_id)s, %(worker)s, %(host)s, %(pid)s, %(process)s, %(gpus)s, %(log_path)s)

-- name: last_checkpoint
-- The newest recorded checkpoint of the trial's earlier attempts.
SELECT checkpoint_step, checkpoint_path
  FROM orch.attempts
 WHERE trial_id = %(trial_id)s AND checkpoint_step IS NOT NULL
 ORDER BY checkpoint_step DESC, started_at DESC
 LIMIT 1

-- name: put_back_values
-- Values up to the checkpoint go back onto the row, from the latest attempt that reported each step; what a plain
-- script reported in between stays.
INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)
SELECT DISTINCT ON (v.key::int) a.trial_id, v.key::int,
       CASE v.value ->> 'type' WHEN 'FINITE' THEN (v.value ->> 'value')::double precision END,
       (v.value ->> 'type')::trialintermediatevaluetype
  FROM orch.attempts a, jsonb_each(a.taken_off) v
 WHERE a.trial_id = %(trial_id)s AND v.key::int <= %(step)s
 ORDER BY v.key::int, a.started_at DESC
ON CONFLICT (trial_id, step) DO NOTHING

-- name: lock_attempt
-- The fence of every write of an owner: nobody can close the attempt while its row is locked, and a closed one
-- gives no row.
SELECT trial_id FROM orch.attempts WHERE token = %(token)s AND ended_at IS NULL FOR UPDATE

-- name: close_attempt
-- The attempt ends, with its reason.
UPDATE orch.attempts SET ended_at = clock_timestamp(), end_reason = %(reason)s, error = %(error)s
 WHERE token = %(token)s

-- name: finish_trial
-- The trial ends in a state of Optuna's, unless somebody (the dashboard) ended it already.
UPDATE trials SET state = %(state)s, datetime_complete = timezone('utc', clock_timestamp())
 WHERE trial_id = %(trial_id)s AND state = 'RUNNING'
RETURNING trial_id

-- name: set_value
-- A final value the way Optuna keeps it: infinities in a column of their own.
INSERT INTO trial_values (trial_id, objective, value, value_type)
VALUES (%(trial_id)s, %(objective)s, %(value)s, %(value_type)s)
ON CONFLICT (trial_id, objective) DO UPDATE SET value = excluded.value, value_type = excluded.value_type

-- name: take_off_values
-- Reported values leave the trial's row, so that whoever pops it next starts clean, and stay with the attempt.
WITH gone AS (
    DELETE FROM trial_intermediate_values WHERE trial_id = %(trial_id)s
    RETURNING step, intermediate_value, intermediate_value_type
)
UPDATE orch.attempts a
   SET taken_off = (SELECT jsonb_object_agg(step, jsonb_build_object(
                               'type', intermediate_value_type, 'value', intermediate_value)) FROM gone)
 WHERE a.token = %(token)s

-- name: take_off_rung_marks
-- Rung marks of the pruners go too: the trial is judged again.
DELETE FROM trial_system_attributes WHERE trial_id = %(trial_id)s AND key LIKE 'completed\_rung\_%%'

-- name: wait_again
-- The same row, the same number, the same parameters: back to WAITING.
UPDATE trials SET state = 'WAITING' WHERE trial_id = %(trial_id)s AND state = 'RUNNING'

-- name: record_checkpoint
-- A checkpoint counts from the moment it is recorded here.
UPDATE orch.attempts SET checkpoint_step = %(step)s, checkpoint_path = %(path)s
 WHERE token = %(token)s AND ended_at IS NULL
RETURNING token

-- name: open_of_study
-- The leases of a study that are held.
SELECT a.token::text, a.worker, a.host, a.process, t.number FROM orch.attempts a JOIN trials t USING (trial_id)
 WHERE t.study_id = %(study_id)s AND a.ended_at IS NULL

-- name: of_study
-- Every attempt of a study, oldest first.
SELECT t.number, a.token::text, a.worker, a.host, a.pid, a.gpus, a.started_at, a.ended_at, a.end_reason, a.error,
       a.log_path, a.checkpoint_step, a.checkpoint_path
  FROM orch.attempts a JOIN trials t USING (trial_id)
 WHERE t.study_id = %(study_id)s AND (%(number)s::int IS NULL OR t.number = %(number)s)
 ORDER BY a.started_at
