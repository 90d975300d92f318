-- Schema orch: what a study is and who runs its trials, beside Optuna's own tables.
-- Optuna has already created studies and trials; everything of ours goes away with their rows.
-- No table here may be called like one of Optuna's: for a role named orch, "$user" puts this schema first on the search
-- path, and Optuna's own unqualified statements would find ours.

CREATE TABLE orch.specs (
    study_id         integer PRIMARY KEY REFERENCES studies ON DELETE CASCADE,
    uid              uuid NOT NULL DEFAULT gen_random_uuid(),
    spec             jsonb NOT NULL,
    facts            jsonb NOT NULL,
    desired          text NOT NULL DEFAULT 'active' CHECK (desired IN ('active', 'paused', 'stopped')),
    n_trials         integer CHECK (n_trials > 0),
    -- Trials that were finished when the definition was given to an existing study, and that do not count.
    n_history        integer NOT NULL DEFAULT 0,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN orch.specs.spec IS 'The definition of the study (orchestrator.spec.StudySpec); never changes';
COMMENT ON COLUMN orch.specs.facts IS 'The objective''s source, its sha256, git commit and package versions; for people, never executed';

COMMENT ON COLUMN orch.specs.uid IS 'Names the study''s files: two databases on one machine both have a study 1';

CREATE TABLE orch.attempts (
    token            uuid PRIMARY KEY,
    trial_id         integer NOT NULL REFERENCES trials ON DELETE CASCADE,
    worker           text NOT NULL,
    host             text NOT NULL,
    pid              integer NOT NULL,
    process          text NOT NULL,
    gpus             text[] NOT NULL DEFAULT '{}',
    started_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at         timestamptz,
    end_reason       text,
    error            text,
    log_path         text,
    checkpoint_step  integer,
    checkpoint_path  text,
    -- Reported values {step: value} that a give-back took off the trial's own row.
    taken_off        jsonb,
    CHECK ((ended_at IS NULL) = (end_reason IS NULL))
);
-- The open attempt of a trial is its lease: there is at most one.
CREATE UNIQUE INDEX attempts_lease ON orch.attempts (trial_id) WHERE ended_at IS NULL;
CREATE INDEX attempts_trial ON orch.attempts (trial_id, started_at);
COMMENT ON COLUMN orch.attempts.process IS 'Boot, pid and start time of the Worker: a pid alone may be another process by now';
