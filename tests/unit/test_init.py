"""`orch init`: what it writes can be run as it is, and it never overwrites anything."""

import re
import sys
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner

from orchestrator import api, objective
from orchestrator.cli import init, root
from orchestrator.spec import StudySpec, read_file
from storage.errors import OrchError

KEYS = [field.alias or name for name, field in StudySpec.model_fields.items()]


class Notes:
    """A checkpoint that is kept in memory."""

    def __init__(self):
        self.state, self.steps = None, []

    def load(self):
        return self.state

    def save(self, state, step, *, best=False):
        self.state = state
        self.steps.append(step)


class TrainersTrial(optuna.trial.FixedTrial):
    """Optuna's trial with fixed parameters, and what a trainer adds to it."""

    def __init__(self, checkpoint, settings, prune_after=None):
        super().__init__({"lr": 0.01, "width": 16, "dropout": 0.1})
        self.settings = settings
        self.device, self.seed = "cpu", 3
        self.checkpoint = checkpoint
        self.prune_after = prune_after
        self.curve = {}

    def report(self, value, step):
        self.curve[step] = value

    def should_prune(self):
        return self.prune_after is not None and max(self.curve) >= self.prune_after


def run_init(*arguments):
    return CliRunner().invoke(root, ["init", *arguments])


@pytest.fixture
def written(tmp_path):
    """The folder that `orch init` has written, and the objective in it."""
    init.write(tmp_path, init.templates())
    folders = list(sys.path)
    yield tmp_path, objective.load(f"{tmp_path}/objective.py:objective", str(tmp_path))
    sys.path[:] = folders


def test_what_init_writes_is_a_definition_that_create_accepts(tmp_path):
    """The two files pass every check that `orch study create` makes, from any working folder."""
    done = run_init(str(tmp_path / "new" / "folder"))
    assert done.exit_code == 0, done.output
    checked = api.check(*api.gather(None, str(tmp_path / "new/folder/study.yaml"), {}))
    assert checked.spec.name == "folder"
    assert checked.facts["objective"]["path"] == str(tmp_path / "new/folder/objective.py")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_a_definition_has_a_line_with_a_comment_above_it(key):
    """Whatever may stand in a study file stands in the template, explained in the lines before it."""
    lines = (Path(init.__file__).parents[1] / "templates/study.yaml").read_text().splitlines()
    at = [number for number, line in enumerate(lines) if re.match(rf"{key}:", line)]
    assert len(at) == 1
    assert lines[at[0] - 1].startswith("# ")


def test_a_full_trial_reports_as_many_steps_as_the_study_expects(written):
    """The template's objective reports max_steps steps, counted from 1, saves each, and learns the digits."""
    folder, function = written
    study = read_file(folder / "study.yaml")
    trial = TrainersTrial(Notes(), study["settings"])
    value = function(trial)
    assert list(trial.curve) == trial.checkpoint.steps == list(range(1, study["max_steps"] + 1))
    assert value == trial.curve[study["max_steps"]] > 0.9


def test_a_hopeless_trial_stops_when_it_is_told_to(written):
    """The template's objective raises TrialPruned at the verdict, and not later."""
    folder, function = written
    trial = TrainersTrial(Notes(), read_file(folder / "study.yaml")["settings"], prune_after=2)
    with pytest.raises(optuna.TrialPruned):
        function(trial)
    assert list(trial.curve) == [1, 2]


def test_an_interrupted_trial_goes_on_where_it_was(written):
    """With a checkpoint of step 2 the template's objective starts at step 3; with a complete one it trains nothing."""
    folder, function = written
    settings = read_file(folder / "study.yaml")["settings"]
    notes = Notes()
    function(TrainersTrial(notes, {**settings, "epochs": 2}))
    resumed = TrainersTrial(notes, {**settings, "epochs": 4})
    value = function(resumed)
    assert list(resumed.curve) == [3, 4]
    again = TrainersTrial(notes, {**settings, "epochs": 4})
    assert function(again) == value
    assert again.curve == {}


@pytest.mark.parametrize("name", init.NAMES)
def test_a_file_that_is_there_is_kept_and_nothing_is_written(tmp_path, name):
    """When one of the files exists, even as a link to nowhere, init refuses in one line and changes nothing."""
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(OrchError, match=re.escape(f"{tmp_path / name} exists already")) as refused:
        init.write(tmp_path, init.templates())
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_where_the_folder_should_be_is_refused_in_one_line(tmp_path):
    """A FOLDER that is a file is refused with a sentence, not with a traceback."""
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OrchError, match="name a folder you may write to"):
        init.write(tmp_path / "taken", init.templates())
    assert (tmp_path / "taken").read_text() == "mine"


def test_half_a_write_leaves_nothing(tmp_path):
    """When the second file cannot be written, the first is taken away again."""
    with pytest.raises(OrchError, match="cannot write"):
        init.write(tmp_path, {"study.yaml": "name: x", "no/such/folder.py": ""})
    assert list(tmp_path.iterdir()) == []


def test_init_says_what_to_run_next(tmp_path, monkeypatch):
    """Without an argument init writes into the working folder, and names the command that runs the study."""
    monkeypatch.chdir(tmp_path)
    done = run_init()
    assert done.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == set(init.NAMES)
    assert "orch run study.yaml --cpu 2" in done.output
