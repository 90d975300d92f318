"""The definition of a study, from YAML or flags: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from orchestrator import spec
from orchestrator.errors import SpecError

MINIMAL = {"name": "digits", "objective": "train.py:objective", "seed": 7}


def parse(**values: Any) -> spec.StudySpec:
    return spec.parse({**MINIMAL, **values})


def refusal(**values: Any) -> str:
    """The one line that refuses a definition."""
    with pytest.raises(SpecError) as refused:
        parse(**values)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 300, "a refusal must not quote a whole document"
    return message


def test_defaults():
    """Three keys are a definition: TPE under Hyperband, minimized, one GPU, no limits."""
    study = parse()
    assert study.directions == ["minimize"]
    assert (study.sampler.name, study.sampler.options) == ("tpe", {})
    assert (study.pruner.name, study.pruner.options) == ("hyperband", {})
    assert (study.n_trials, study.max_steps, study.gpus_per_trial, study.settings) == (None, None, 1, {})


@pytest.mark.parametrize(
    ("key", "near"),
    [("n_trails", "n_trials"), ("max-steps", "max_steps"), ("nme", "name"), ("Sampler", "sampler")],
)
def test_unknown_key_names_the_nearest(key, near):
    """A mistyped key is refused together with the key that was probably meant."""
    assert refusal(**{key: 3}) == f"unknown key {key!r} in the study's definition: did you mean {near!r}?"


def test_unknown_key_far_from_all_lists_them():
    """A key that resembles none is refused with all known ones, `direction` by its public name."""
    message = refusal(zzzz=3)
    assert "known are" in message
    assert "direction," in message
    assert "directions" not in message


@pytest.mark.parametrize("key", [5, None, True, "x" * 5000])
def test_odd_keys_are_refused_shortly(key):
    """YAML keys may be of any type and length: the refusal stays one short line."""
    with pytest.raises(SpecError, match="unknown key") as refused:
        spec.parse({**MINIMAL, key: 1})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("missing", ["name", "objective", "seed"])
def test_missing_keys(missing):
    """A definition without one of its necessary keys names that key."""
    with pytest.raises(SpecError, match=f"{missing}.*required|needs an {missing}"):
        spec.parse({key: value for key, value in MINIMAL.items() if key != missing})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("n_trials", "5", "valid integer"),
        ("n_trials", True, "valid integer"),
        ("n_trials", 5.0, "valid integer"),
        ("n_trials", 0, "greater than or equal to 1"),
        ("n_trials", 2**31, "less than or equal"),
        ("max_steps", 0, "greater than or equal to 1"),
        ("max_steps", 2**31, "less than or equal"),
        ("gpus_per_trial", 0, "greater than or equal to 1"),
        ("gpus_per_trial", [1], "valid integer"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", 2**32, "less than or equal to 4294967295"),
        ("seed", 1.5, "valid integer"),
        ("name", "", "at least 1 character"),
        ("name", "n" * 513, "at most 512 characters"),
        ("name", 12, "valid string"),
        ("name", " digits", "without spaces at the ends"),
        ("name", "two\nlines", "printable"),
        ("objective", 5, "valid string"),
        ("settings", ["lr"], "valid dictionary"),
        ("settings", None, "valid dictionary"),
        ("sampler", 5, "valid dictionary"),
        ("sampler", {}, "field required"),
        ("sampler", {"name": 5}, "valid string"),
        ("pruner", None, "valid dictionary"),
        ("direction", "up", "'minimize' or 'maximize'"),
        ("direction", "MAXIMIZE", "'minimize' or 'maximize'"),
        ("direction", [], "at least 1 item"),
        ("direction", ["minimize", 3], "'minimize' or 'maximize'"),
    ],
)
def test_wrong_values_are_refused_with_their_key(key, value, said):
    """Each wrong type or limit is refused in one line that starts with the key and says what is expected."""
    message = refusal(**{key: value})
    assert message.startswith(key), message
    assert said in message


def test_name_of_600_characters_is_not_quoted_whole():
    """A name that Optuna's column cannot hold is refused, and shortened in the refusal."""
    message = refusal(name="n" * 600)
    assert "at most 512 characters" in message
    assert len(message) < 150


def test_limits_themselves_are_allowed():
    """The ends of the ranges belong to them."""
    study = parse(name="n" * 512, seed=2**32 - 1, n_trials=1, max_steps=2**31 - 1)
    assert study.seed == 2**32 - 1
    assert parse(seed=0).seed == 0


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        ("tpe", "tpe", {}),
        ("tpe:n_startup_trials=20", "tpe", {"n_startup_trials": 20}),
        (" tpe : n_startup_trials=20, multivariate=false", "tpe", {"n_startup_trials": 20, "multivariate": False}),
        ({"name": "tpe", "n_startup_trials": 20}, "tpe", {"n_startup_trials": 20}),
        ({"name": "tpe", "options": {"n_startup_trials": 20}}, "tpe", {"n_startup_trials": 20}),
        ("tpe:prior_weight=5e-1", "tpe", {"prior_weight": 0.5}),
        ("grid:search_space={lr: [0.1, 0.2]}", "grid", {"search_space": {"lr": [0.1, 0.2]}}),
    ],
)
def test_forms_of_a_sampler(given, name, options):
    """A sampler or pruner may be a word, a word with options, or a mapping; all mean the same."""
    for key in ("sampler", "pruner"):
        chosen = getattr(parse(**{key: given}), key)
        assert (chosen.name, chosen.options) == (name, options)


@pytest.mark.parametrize("given", ["tpe:n_startup_trials", "tpe:=5", "tpe:x={"])
def test_unreadable_options_of_a_short_form(given):
    """A short form whose options are no KEY=VALUE pairs is refused in one line."""
    assert "KEY=VALUE" in refusal(sampler=given) or "cannot be read" in refusal(sampler=given)


NOT_JSON = [
    float("nan"),
    float("inf"),
    datetime.date(2026, 1, 2),
    {1: "one"},
    {"deep": [{"deeper": b"bytes"}]},
    "a\0b",
]


@pytest.mark.parametrize("value", NOT_JSON)
def test_settings_must_be_json(value):
    """What PostgreSQL's jsonb cannot hold is refused with the path to it, before anything is written."""
    assert "settings.key" in refusal(settings={"key": value})


@pytest.mark.parametrize("value", NOT_JSON)
@pytest.mark.parametrize("kind", ["sampler", "pruner"])
def test_options_must_be_json(kind, value):
    """Options of samplers and pruners are stored as JSON too, so that the same is refused."""
    assert kind in refusal(**{kind: {"name": "any", "option": value}})


def test_several_directions_cannot_prune():
    """Optuna cannot prune with several objectives: said when the study is defined, with the way out."""
    assert "--pruner none" in refusal(direction=["minimize", "maximize"])
    both = parse(directions=["minimize", "maximize"], pruner="none")
    assert both.directions == ["minimize", "maximize"]


def test_one_direction_as_a_word():
    """`direction: maximize` is a list of one."""
    assert parse(direction="maximize").directions == ["maximize"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("./train.py:objective", "train.py:objective"),
        ("a/../train.py:objective", "train.py:objective"),
        ("pkg.mod:objective", "pkg.mod:objective"),
    ],
)
def test_spellings_of_one_objective(given, kept):
    """Two spellings of one file are one definition."""
    assert parse(objective=given).objective == kept


def test_round_trip():
    """What is stored and read back is the same definition, through real JSON."""
    study = parse(
        direction=["maximize"],
        n_trials=20,
        max_steps=27,
        sampler="tpe:n_startup_trials=20",
        pruner={"name": "asha", "reduction_factor": 3},
        gpus_per_trial=2,
        settings={"lr": 0.1 + 0.2, "deep": {"list": [1, None, True, "x"]}, "big": 2**60},
    )
    stored = json.loads(json.dumps(study.to_json()))
    assert spec.from_stored(stored) == study
    assert spec.from_stored(stored).to_json() == study.to_json()


def test_stored_by_a_newer_orch():
    """A stored key that this orch does not know is refused, and never silently ignored."""
    with pytest.raises(SpecError, match="promotion"):
        spec.from_stored({**parse().to_json(), "promotion": True})


def test_definitions_do_not_change():
    """A definition cannot be modified after it was validated."""
    with pytest.raises(ValueError, match="frozen"):
        parse().n_trials = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("0.1", 0.1),
        ("12", 12),
        ("-3", -3),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("resnet18", "resnet18"),
        ("a=b", "a=b"),
        ("/data/a b", "/data/a b"),
        ("'12'", "12"),
        ("'1e-3'", "1e-3"),
        ('"1e5"', "1e5"),
        ("infinity", "infinity"),
        ("12e4567", "12e4567"),
    ],
)
def test_pairs(text, value):
    """Values of --set are what a person means by them: 1e-3 is a number, true a bool, and what is quoted a string."""
    found = spec.parse_pairs([f"key={text}"])["key"]
    assert found == value
    assert type(found) is type(value)


def test_several_pairs():
    """The last of two values for one key counts, and blanks around keys do not."""
    assert spec.parse_pairs(["a=1", " b =2", "a=3"]) == {"a": 3, "b": 2}


@pytest.mark.parametrize("pair", ["lr", "=3", " =3", "a={", "a=[1"])
def test_pairs_that_are_none(pair):
    """A pair without a key, an equals sign or a readable value is refused, and quoted."""
    with pytest.raises(SpecError, match=r"KEY=VALUE|quote it") as refused:
        spec.parse_pairs([pair])
    assert repr(pair) in str(refused.value)


def test_study_file(tmp_path):
    """A study file is a YAML mapping of the definition's keys."""
    path = tmp_path / "study.yaml"
    path.write_text("name: digits\nn_trials: 5\npruner: none\nsettings: {lr: 0.1}\n")
    assert spec.read_file(path) == {"name": "digits", "n_trials": 5, "pruner": "none", "settings": {"lr": 0.1}}


def test_numbers_of_a_study_file(tmp_path):
    """`lr: 1e-3` is the same number in a file as in --set, or one study would have two definitions."""
    path = tmp_path / "study.yaml"
    path.write_text("settings: {lr: 1e-3}\n")
    assert spec.read_file(path)["settings"] == spec.parse_pairs(["lr=1e-3"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: digits\nsettings: {lr: 1\n", ", line [23]: not YAML"),
        (b"a: 1\n\tb: 2\n", ", line 2: not YAML"),
        (b"- a\n- b\n", "must hold a mapping"),
        (b"", "must hold a mapping"),
        (b"name: \xff\xfe\n", "not YAML"),
        (b"name: a\0b\n", "not YAML"),
        (b"name: !!python/object:os.system {}\n", ", line 1: not YAML"),
    ],
)
def test_unreadable_study_files(tmp_path, content, said):
    """A file that is no YAML mapping is refused in one line, with the line of the file where there is one."""
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=said) as refused:
        spec.read_file(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_study_file_that_cannot_be_opened(tmp_path, name):
    """A missing file, or a folder, is refused by its path."""
    with pytest.raises(SpecError, match="cannot read the study file"):
        spec.read_file(tmp_path / name)
