-- name: insert_study
-- A study row of Optuna's; no row comes back when the name is taken.
INSERT INTO studies (study_name) VALUES (%(name)s) ON CONFLICT (study_name) DO NOTHING RETURNING study_id

-- name: insert_direction
-- One direction per objective.
INSERT INTO study_directions (direction, study_id, objective) VALUES (%(direction)s, %(study_id)s, %(objective)s)

-- name: insert_definition
-- The definition of the study, once; no row comes back when it has one.
INSERT INTO orch.specs (study_id, spec, facts, n_trials, n_history)
VALUES (%(study_id)s, %(spec)s, %(facts)s, %(n_trials)s, %(n_history)s)
ON CONFLICT (study_id) DO NOTHING
RETURNING study_id

-- name: find
-- One study by its name, with its definition if it has one.
SELECT s.study_id, s.study_name AS name, o.uid::text, o.spec, o.facts, o.desired, o.n_trials, o.n_history, o.created_at,
       (SELECT array_agg(d.direction::text ORDER BY d.objective) FROM study_directions d
         WHERE d.study_id = s.study_id) AS directions
  FROM studies s LEFT JOIN orch.specs o USING (study_id)
 WHERE s.study_name = %(name)s

-- name: names
-- Every study's name, for the nearest one when a name is mistyped.
SELECT study_name FROM studies ORDER BY study_id

-- name: list
-- Every study with its counts of trials by state.
SELECT s.study_id, s.study_name AS name, o.uid::text, o.spec, o.desired, o.n_trials, o.n_history, o.created_at,
       (SELECT array_agg(d.direction::text ORDER BY d.objective) FROM study_directions d
         WHERE d.study_id = s.study_id) AS directions,
       coalesce((SELECT jsonb_object_agg(state, n) FROM (
           SELECT t.state, count(*) AS n FROM trials t WHERE t.study_id = s.study_id GROUP BY t.state) c), '{}') AS counts
  FROM studies s LEFT JOIN orch.specs o USING (study_id)
 ORDER BY s.study_id

-- name: counts
-- Trials by state.
SELECT t.state::text, count(*) AS n FROM trials t WHERE t.study_id = %(study_id)s GROUP BY t.state

-- name: best_trial
-- The best finished trial of a study with one objective; an infinity nobody asked for is never the best.
SELECT t.number, v.value
  FROM trials t JOIN trial_values v USING (trial_id)
 WHERE t.study_id = %(study_id)s AND t.state = 'COMPLETE' AND v.objective = 0 AND v.value_type = 'FINITE'
 ORDER BY v.value * %(sign)s, t.number
 LIMIT 1

-- name: accept_objective
-- Another version of the objective becomes the recorded one.
UPDATE orch.specs SET facts = %(facts)s WHERE study_id = %(study_id)s RETURNING study_id

-- name: set_desired
-- What workers are to do; they see it at their next take.
UPDATE orch.specs SET desired = %(desired)s WHERE study_id = %(study_id)s RETURNING study_id

-- name: lock_study
-- No trial can be created while this is held.
SELECT 1 FROM studies WHERE study_id = %(study_id)s FOR UPDATE

-- name: lock_attempts
-- No trial can be settled or given back while this is held.
SELECT 1 FROM orch.attempts a JOIN trials t USING (trial_id) WHERE t.study_id = %(study_id)s FOR UPDATE OF a

-- name: lock_trials
-- No value can be added to a trial while this is held.
SELECT 1 FROM trials WHERE study_id = %(study_id)s FOR UPDATE

-- name: delete
-- Everything of a study in one statement, children first: Optuna's foreign keys do not cascade; orch's follow theirs.
WITH victims AS (SELECT trial_id FROM trials WHERE study_id = %(study_id)s),
     a AS (DELETE FROM trial_user_attributes WHERE trial_id IN (SELECT trial_id FROM victims)),
     b AS (DELETE FROM trial_system_attributes WHERE trial_id IN (SELECT trial_id FROM victims)),
     c AS (DELETE FROM trial_params WHERE trial_id IN (SELECT trial_id FROM victims)),
     d AS (DELETE FROM trial_values WHERE trial_id IN (SELECT trial_id FROM victims)),
     e AS (DELETE FROM trial_intermediate_values WHERE trial_id IN (SELECT trial_id FROM victims)),
     f AS (DELETE FROM trial_heartbeats WHERE trial_id IN (SELECT trial_id FROM victims)),
     g AS (DELETE FROM trials WHERE study_id = %(study_id)s),
     h AS (DELETE FROM study_user_attributes WHERE study_id = %(study_id)s),
     i AS (DELETE FROM study_system_attributes WHERE study_id = %(study_id)s),
     j AS (DELETE FROM study_directions WHERE study_id = %(study_id)s)
DELETE FROM studies WHERE study_id = %(study_id)s RETURNING study_id
