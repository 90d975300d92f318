"""StudySpec: the definition of a study, from YAML or flags; stored whole with the study and never changed."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from orchestrator.errors import SpecError

MAX_NAME = 512  # Optuna's column
MAX_SEED = 2**32 - 1
MAX_STEP = 2**31 - 1  # Optuna's column is a 32-bit integer

Direction = Literal["minimize", "maximize"]


class Named(BaseModel):
    """A sampler or pruner by its name, with its options: ``tpe``, ``tpe:n_startup_trials=20``, or a mapping."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def _named(value: Any) -> Any:
    """Accept the short forms of a sampler or pruner."""
    if isinstance(value, str):
        name, _, options = value.partition(":")
        return {"name": name.strip(), "options": parse_pairs(_split_options(options)) if options else {}}
    if isinstance(value, Mapping) and "name" in value and "options" not in value:
        return {"name": value["name"], "options": {key: item for key, item in value.items() if key != "name"}}
    return value


def _directions(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StudySpec(BaseModel):
    """What a study is: every worker rebuilds sampler, pruner and limits from this alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME)
    objective: str
    directions: Annotated[list[Direction], BeforeValidator(_directions)] = Field(
        default=["minimize"], alias="direction", min_length=1
    )
    n_trials: int | None = Field(default=None, ge=1, le=MAX_STEP)
    max_steps: int | None = Field(default=None, ge=1, le=MAX_STEP)
    sampler: Annotated[Named, BeforeValidator(_named)] = Named(name="tpe")
    pruner: Annotated[Named, BeforeValidator(_named)] = Named(name="hyperband")
    seed: int = Field(ge=0, le=MAX_SEED)
    gpus_per_trial: int = Field(default=1, ge=1, le=1024)
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError("must be printable, without spaces at the ends")
        return name

    @field_validator("objective")
    @classmethod
    def _normal_path(cls, reference: str) -> str:
        where, colon, function = reference.rpartition(":")
        # "./f.py:objective" and "f.py:objective" are one objective.
        return f"{os.path.normpath(where)}{colon}{function}" if where.endswith(".py") else reference

    @field_validator("settings")
    @classmethod
    def _plain_json(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for key, value in settings.items():
            _refuse_not_json(value, f"settings.{key}")
        return settings

    @field_validator("sampler", "pruner")
    @classmethod
    def _plain_options(cls, named: Named) -> Named:
        _refuse_not_json(named.options, named.name)
        return named

    @model_validator(mode="after")
    def _pruner_fits(self) -> StudySpec:
        if len(self.directions) > 1 and self.pruner.name != "none":
            raise ValueError("a study with several directions cannot prune: add `pruner: none` (--pruner none)")
        return self

    def to_json(self) -> dict[str, Any]:
        """The form that is stored, and that `from_stored` reads."""
        return self.model_dump(mode="json", by_alias=True)


def from_stored(document: Mapping[str, Any]) -> StudySpec:
    """Read a stored definition.

    Raises:
        SpecError: it was written by a newer orch.
    """
    return parse(document)


def parse(values: Mapping[str, Any]) -> StudySpec:
    """Validate a definition.

    Raises:
        SpecError: the first thing that is wrong with it; an unknown key comes with the nearest known one.
    """
    values = dict(values)
    if "directions" in values:
        values["direction"] = values.pop("directions")
    known = [field.alias or name for name, field in StudySpec.model_fields.items()]
    for key in values:
        if key not in known:
            raise SpecError(f"unknown key {str(key)[:80]!r} in the study's definition{nearest(str(key), known)}")
    if "objective" not in values:
        raise SpecError("the study needs an objective: package.module:function or path/to/file.py:function")
    try:
        return StudySpec(**values)
    except RecursionError:
        raise SpecError("the study's definition contains itself") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        said = first["msg"].removeprefix("Value error, ")
        got = first.get("input")
        shown = "" if isinstance(got, dict | StudySpec) or first["type"] == "missing" else f" (got {got!r:.60})"
        raise SpecError(f"{where or 'study'}: {said[0].lower()}{said[1:]}{shown}") from None


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a study file.

    Raises:
        SpecError: it cannot be read, or is no YAML mapping.
    """
    try:
        document = yaml.load(Path(path).read_text(), _Yaml)
    except OSError as error:
        raise SpecError(f"cannot read the study file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        said = " ".join(str(getattr(error, "problem", None) or error).split())
        raise SpecError(f"{path}{where}: not YAML: {said}") from None
    if not isinstance(document, dict):
        raise SpecError(f"the study file {path} must hold a mapping of keys and values")
    return document


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; values are YAML: ``lr=1e-3`` is a number, ``on=true`` a bool, ``n='12'`` a string.

    Raises:
        SpecError: a pair without ``=`` or with an unreadable value.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"{pair!r} must be KEY=VALUE")
        try:
            found[key.strip()] = yaml.load(text, _Yaml)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise SpecError(f"the value of {pair!r} cannot be read: quote it") from None
    return found


def _split_options(text: str) -> list[str]:
    """Split at the commas outside of brackets: ``search_space={lr: [0.1, 0.2]},other=1``."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


class _Yaml(yaml.SafeLoader):
    """YAML with 1e-3 as a number: YAML 1.1 asks for a dot, and nobody who types it means a string."""


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | str:
    number = float(node.value)
    return number if math.isfinite(number) else str(node.value)


_Yaml.add_implicit_resolver("!exponent", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))
_Yaml.add_constructor("!exponent", _exponent)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses `word`: the nearest known word, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]!r}?" if near else f": known are {', '.join(known)}"


def _refuse_not_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or "\0" in key:
                raise ValueError(f"{where}: the key {key!r} must be a string without NUL")
            _refuse_not_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            _refuse_not_json(item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not a number that JSON can hold")
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"{where}: a string with a NUL character is nothing that PostgreSQL can hold")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"{where}: a {type(value).__name__} is not JSON: quote it")
