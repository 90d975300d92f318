"""From the spec to Optuna's samplers and pruners: every name, every refusal, every seed."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from orchestrator import search, spec
from orchestrator.errors import SpecError

MINIMAL = {"name": "digits", "objective": "train.py:objective", "seed": 7, "max_steps": 27}

SAMPLER_OPTIONS: dict[str, dict[str, Any]] = {"grid": {"search_space": {"x": [1, 2, 3]}}}
PRUNER_OPTIONS: dict[str, dict[str, Any]] = {
    "percentile": {"percentile": 25.0},
    "patient": {"patience": 3},
    "threshold": {"upper": 5.0},
}


def parse(**values: Any) -> spec.StudySpec:
    return spec.parse({**MINIMAL, **values})


def build(**values: Any) -> None:
    """What `orch study create` builds to see that it can be built."""
    study = parse(**values)
    search.build_sampler(study)
    search.build_pruner(study)


def refusal(**values: Any) -> str:
    """The one line that refuses a sampler or a pruner."""
    with pytest.raises(SpecError) as refused:
        build(**values)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def suggest(study_spec: spec.StudySpec, study: optuna.Study, number: int) -> dict[str, Any]:
    """What a worker that takes trial `number` next suggests."""
    study.sampler = search.build_sampler(study_spec, number)
    trial = study.ask()
    assert trial.number == number
    trial.suggest_float("lr", 1e-5, 1.0, log=True)
    trial.suggest_int("width", 8, 512)
    trial.suggest_categorical("optimizer", ["sgd", "adam", "lion"])
    study.tell(trial, trial.params["lr"])
    return trial.params


@pytest.mark.parametrize("name", search.SAMPLERS)
def test_every_sampler_builds_and_samples(name):
    """Each sampler of the table is built from its minimal options, and proposes a trial without a warning."""
    study = optuna.create_study(
        sampler=search.build_sampler(parse(sampler={"name": name, **SAMPLER_OPTIONS.get(name, {})}))
    )
    trial = study.ask()
    assert trial.suggest_int("x", 1, 3) in (1, 2, 3)


@pytest.mark.parametrize("name", search.PRUNERS)
def test_every_pruner_builds_and_judges(name):
    """Each pruner of the table is built from its minimal options, and judges a report without a warning."""
    study = optuna.create_study(
        pruner=search.build_pruner(parse(pruner={"name": name, **PRUNER_OPTIONS.get(name, {})}))
    )
    trial = study.ask()
    trial.report(0.5, 1)
    assert trial.should_prune() in (True, False)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sampler": "tp"}, "unknown sampler 'tp': did you mean 'tpe'?"),
        ({"sampler": "bayes-opt"}, "known are tpe, random"),
        ({"sampler": ""}, "unknown sampler"),
        ({"sampler": "s" * 5000}, "unknown sampler"),
        ({"pruner": "hyperbnd"}, "unknown pruner 'hyperbnd': did you mean 'hyperband'?"),
        ({"sampler": "tpe:n_startup_trails=3"}, "no option 'n_startup_trails': did you mean 'n_startup_trials'?"),
        ({"pruner": "asha:reduction_fator=3"}, "did you mean 'reduction_factor'?"),
        ({"pruner": "none:x=1"}, "it has no options"),
        ({"sampler": "tpe:seed=3"}, "has no option 'seed'"),
        ({"pruner": "hyperband:max_resource=3"}, "has no option 'max_resource'"),
        ({"sampler": "grid"}, "search_space"),
        ({"sampler": {"name": "grid", "search_space": 5}}, "refuses its options"),
        ({"pruner": "threshold"}, "lower or upper"),
        ({"pruner": "percentile:percentile=101"}, "between 0 and 100"),
        ({"pruner": "median:n_startup_trials=-1"}, "cannot be negative"),
        ({"pruner": "asha:reduction_factor=1"}, "reduction_factor >= 2"),
        ({"sampler": "nsgaii:population_size=1"}, "greater than or equal to 2"),
        ({"sampler": "qmc:qmc_type=foo"}, "halton"),
        ({"pruner": {"name": "patient", "patience": 1, "wrapped_pruner": "medain"}}, "did you mean 'median'?"),
        ({"pruner": {"name": "patient", "patience": 1, "wrapped_pruner": 5}}, "wrapped_pruner"),
        ({"pruner": {"name": "patient", "patience": 1, "wrapped_pruner": {"name": 5}}}, "wrapped_pruner"),
    ],
)
def test_refusals(values, said):
    """Unknown names and options come with the nearest known one; what Optuna refuses is one line of ours."""
    message = refusal(**values)
    assert said in message
    assert len(message) < 500


def test_hyperband_needs_max_steps():
    """Hyperband without max_steps would be decided by each process's first trial: refused, with both ways out."""
    message = refusal(max_steps=None)
    assert "--max-steps N" in message
    assert "--pruner none" in message
    assert isinstance(search.build_pruner(parse(max_steps=None, pruner="median")), optuna.pruners.MedianPruner)


def test_hyperband_gets_max_steps():
    """The brackets of Hyperband follow from max_steps: 27 steps and a reduction factor of 3 are four of them."""
    pruner = search.build_pruner(parse())
    study = optuna.create_study(pruner=pruner)
    trial = study.ask()
    trial.report(1.0, 1)
    trial.should_prune()
    assert isinstance(pruner, optuna.pruners.HyperbandPruner)
    assert len(pruner._pruners) == 4


def test_hyperband_without_a_bracket():
    """A first rung beyond max_steps leaves no bracket at all (Optuna then divides by zero): refused at creation."""
    assert "min_resource" in refusal(pruner="hyperband:min_resource=28")


@pytest.mark.parametrize("pruner", ["hyperband:reduction_factor=1", "hyperband:min_resource=0"])
def test_hyperband_that_cannot_count_its_brackets(pruner):
    """Optuna checks Hyperband's numbers only in the first trial that reports: refused at creation instead."""
    refusal(pruner=pruner)


def test_asha_does_not_guess():
    """ASHA's first rung is at step 1, and `auto`, which two workers would resolve differently, is refused."""
    assert "min_resource" in refusal(pruner="asha:min_resource=auto")


def test_hyperband_inside_patient():
    """Optuna looks for Hyperband by isinstance, so that a wrapped one would lose its brackets: refused."""
    assert "hyperband" in refusal(pruner={"name": "patient", "patience": 2, "wrapped_pruner": "hyperband"})


@pytest.mark.parametrize(
    "values",
    [
        {"sampler": "tpe:n_startup_trials=abc"},
        {"sampler": "tpe:gamma=5"},
        {"sampler": "tpe:n_ei_candidates=many"},
        {"sampler": "cmaes:sigma0=wide"},
        {"pruner": "hyperband:reduction_factor=x"},
        {"pruner": "wilcoxon:n_startup_steps=abc"},
    ],
)
def test_options_of_the_wrong_type(values):
    """An option that would only fail in the first trials of a Worker is refused when the study is defined."""
    refusal(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"sampler": {"name": "cmaes", "x0": {"lr": 0.1}, "sigma0": 1, "popsize": None}},
        {"sampler": {"name": "tpe", "prior_weight": 2, "multivariate": False, "group": False}},
        {"sampler": "nsgaii:population_size=4,crossover_prob=1"},
        {"pruner": "asha:min_resource=2,reduction_factor=2"},
        {"pruner": "threshold:lower=0,upper=1e-3"},
        {"pruner": "patient:patience=2,min_delta=0"},
        {"pruner": "hyperband:min_resource=3,reduction_factor=3"},
    ],
)
def test_options_of_the_right_type(values):
    """Options of every kind that JSON can hold are accepted, whole numbers for floats too."""
    build(**values)


def test_patient_wraps():
    """The patient pruner takes the pruner that it delays by name, or with options."""
    by_name = search.build_pruner(parse(pruner={"name": "patient", "patience": 2, "wrapped_pruner": "median"}))
    assert isinstance(by_name._wrapped_pruner, optuna.pruners.MedianPruner)
    wrapped = {"name": "asha", "reduction_factor": 2}
    with_options = search.build_pruner(parse(pruner={"name": "patient", "patience": 2, "wrapped_pruner": wrapped}))
    assert with_options._wrapped_pruner._reduction_factor == 2


def test_options_arrive():
    """Options reach Optuna's constructor."""
    assert search.build_sampler(parse(sampler="tpe:n_startup_trials=20"))._n_startup_trials == 20
    assert search.build_pruner(parse(pruner="median:n_startup_trials=2"))._n_startup_trials == 2


def test_seeds_differ_by_trial_and_purpose():
    """Every trial and every purpose has a seed of its own, a 32-bit number that only they and the study decide."""
    one, other = parse(), parse(seed=8)
    seeds = [search.seed_of(one, number, purpose) for number in range(500) for purpose in ("sampler", "trial")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert search.seed_of(one, 3, "trial") == search.seed_of(parse(name="other"), 3, "trial")
    assert search.seed_of(one, 3, "trial") != search.seed_of(other, 3, "trial")
    # Pinned: a study that was begun by another version of orch goes on with the same seeds.
    assert search.seed_of(one, 0, "sampler") == 138031286


def test_every_sampler_of_chance_takes_a_seed():
    """No sampler is left without a seed: two builds for one trial agree, builds for two trials do not."""
    for name in search.SAMPLERS:
        study_spec = parse(sampler={"name": name, **SAMPLER_OPTIONS.get(name, {})})
        draws = []
        for number in (0, 0, 1):
            study = optuna.create_study(sampler=search.build_sampler(study_spec, number))
            trial = study.ask()
            names = ["x"] if name == "grid" else [f"x{i}" for i in range(8)]
            draws.append([trial.suggest_int(x, 1, 3) for x in names])
        assert draws[0] == draws[1], name
        assert (draws[0] == draws[2]) == (name in search.ONE_SEED), name


@pytest.mark.parametrize("name", sorted(search.ONE_SEED))
def test_one_sequence_for_all_workers(name):
    """Workers of a QMC, grid or brute-force study share one sequence: together they repeat no point."""
    options = {"search_space": {"x": list(range(8))}} if name == "grid" else {}
    study_spec = parse(sampler={"name": name, **options}, pruner="none")
    study = optuna.create_study()
    seen = []
    for number in range(8):
        study.sampler = search.build_sampler(study_spec, number)  # another worker each time
        trial = study.ask()
        seen.append(trial.suggest_float("x", 0, 7) if name == "qmc" else trial.suggest_int("x", 0, 7))
        # Not `tell`: it fails at the last point (fact 31), which leader.after_trial is for.
        study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.COMPLETE, [0.0])
    assert len(set(seen)) == 8


def test_two_workers_propose_different_trials():
    """Two workers with one study seed propose different parameters, because their trials have different numbers."""
    study_spec = parse(sampler="random")
    first = suggest(study_spec, optuna.create_study(), 0)
    study = optuna.create_study()
    study.add_trial(optuna.create_trial(value=1.0))
    assert first != suggest(study_spec, study, 1)


def test_a_suggestion_is_reproduced_by_its_number():
    """A study that is run twice proposes the same trials, whichever worker takes which: the number decides."""
    study_spec = parse(sampler="tpe:n_startup_trials=3")
    runs = []
    for _ in range(2):
        study = optuna.create_study()
        runs.append([suggest(study_spec, study, number) for number in range(6)])
    assert runs[0] == runs[1]
    assert len({tuple(params.items()) for params in runs[0]}) == 6
