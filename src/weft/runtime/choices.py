"""Launch choices as data: how a kernel is cut into programs, chosen by facts of a call and its target.

A *choice* is a function from facts (sizes, names, flags: never tensors) and a target to a config, a NamedTuple of
integers. It is declared with a name and the limits of its tunable fields:

    @choice("norm.rows", rows=(1, 64), tile=(64, 16384), num_warps=(1, 16))
    def row_config(cols: int, smallest_tile: int, target: Capabilities) -> RowConfig: ...

Three sources are consulted, in this order, and the answer is cached, so that only the first call consults them:

1. what was tuned for the device (`weft tune`), in a file that is read once, when the device is first used. The files
   of this machine's devices are `~/.cache/weft/tuned/DEVICE-TRITON.json`. `WEFT_CHOICES` names another folder; or one
   file, which then holds for every device of the target it was made for, also in ahead-of-time compilation; or
   nothing, if it is empty;
2. the shipped rules in `choices.json` beside the module of the function: tables by target;
3. the function itself, a formula.

No fact is a number of rows, except whether there are few: neither the compiled code nor the bits of a row may depend
on it. Nothing is ever tuned inside a call.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from . import bundle
from .capabilities import NOTHING_TUNED, Capabilities, Fact, Key, Tuned
from .remembered import remembered

SCHEMA = 1
VARIABLE = "WEFT_CHOICES"
RULES = "choices.json"  # beside the module of a choice
# Ignored on a CPU.
OF_GPUS = ("num_warps", "num_stages")

P = ParamSpec("P")
C = TypeVar("C")


class TilesError(ValueError):
    """Error about a file of choices that cannot be used."""


# ---- choices ----------------------------------------------------------------------------------------------


class Choice:
    """Declared choice: its formula, its rules and the configs near the chosen one."""

    def __init__(self, name: str, function: Callable[..., Any], limits: dict[str, tuple[int, int]]) -> None:
        self.name, self.function, self.limits = name, function, limits
        self.facts = tuple(inspect.signature(function).parameters)[:-1]  # the last parameter is the target
        self.module: str = function.__module__

    @functools.cached_property
    def rules(self) -> list[_Rule]:
        """The shipped rules; the first that matches a call wins."""
        path = Path(inspect.getfile(self.function)).with_name(RULES)
        tables = _table(path) if path.exists() else {}
        return _rules(self, tables[self.name], path) if self.name in tables else []

    def choose(self, *facts_and_target: Any) -> Any:
        """Return the config for these facts and this target."""
        *facts, target = facts_and_target
        return self.with_fields(
            self.default(tuple(facts), target), target.tuned.find(self.name, tuple(facts)) or {}
        )

    def default(self, facts: tuple[Fact, ...], target: Capabilities) -> Any:
        """Return the config that is chosen if nothing is tuned."""
        for rule in self.rules:
            config = rule.find(facts, target)
            if config is not None:
                return config
        return self.function(*facts, target)

    def with_fields(self, config: Any, fields: Mapping[str, int]) -> Any:
        return config._replace(**fields) if fields else config

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise if a field cannot be tuned or its value is beyond its limits."""
        for field, value in fields.items():
            if field not in self.limits:
                raise TilesError(f"{self.name} has no field {field!r}; there are {', '.join(self.limits)}")
            low, high = self.limits[field]
            in_range = type(value) is int and low <= value <= high
            if not in_range or (field != "num_stages" and value & (value - 1)):
                kind = "an integer" if field == "num_stages" else "a power of two"
                raise TilesError(f"{field} of {self.name} must be {kind} from {low} to {high}, not {value!r}")

    def near(self, config: Any, target: Capabilities) -> Iterator[Any]:
        """Yield the configs with one field halved or doubled, or with one stage more or less."""
        for field, (low, high) in self.limits.items():
            if target.is_cpu and field in OF_GPUS:
                continue
            value = getattr(config, field)
            steps = (value - 1, value + 1) if field == "num_stages" else (value // 2, value * 2)
            for neighbor in steps:
                if low <= neighbor <= high:
                    yield config._replace(**{field: neighbor})

    def fields_of(self, config: Any) -> dict[str, int]:
        """Return the tunable fields of a config."""
        return {field: getattr(config, field) for field in self.limits}

    def key(self, facts: Mapping[str, Any]) -> Key:
        """Return the key of facts given by name."""
        if set(facts) != set(self.facts):
            raise TilesError(f"the facts of {self.name} are {', '.join(self.facts)}, not {', '.join(facts)}")
        return self.name, tuple(facts[fact] for fact in self.facts)


choices: dict[str, Choice] = {}  # all declared choices, by name


def choice(name: str, **limits: tuple[int, int]) -> Callable[[Callable[P, C]], Callable[P, C]]:
    """Declare a choice. The function is called with positional arguments: the facts, then the target."""

    def declare(function: Callable[P, C]) -> Callable[P, C]:
        if name in choices:
            raise ValueError(f"choice {name!r} is declared twice")
        declared = choices[name] = Choice(name, function, limits)
        cached: Any = remembered(declared.choose)
        functools.update_wrapper(cached, function)
        return cast("Callable[P, C]", cached)

    return declare


# ---- rules that are shipped -------------------------------------------------------------------------------


class _Rule:
    """Configs by target, for calls whose facts match: equal to a value, one of a list, or `{"most": number}`."""

    def __init__(self, when: dict[int, Any], targets: dict[str, Any]) -> None:
        self.when, self.targets = when, targets

    def find(self, facts: tuple[Fact, ...], target: Capabilities) -> Any:
        if not all(_fits(facts[position], wanted) for position, wanted in self.when.items()):
            return None
        names = (target.target, target.family, "")
        return next((self.targets[name] for name in names if name in self.targets), None)


def _fits(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return bool(fact <= wanted["most"])
    return fact in wanted if isinstance(wanted, list) else bool(fact == wanted)


@functools.cache
def _table(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def _rules(of: Choice, table: dict[str, Any], path: Path) -> list[_Rule]:
    """Parse and check the rules of a choice: `{"config": names, "rules": [{"when": facts, "targets": configs}]}`. A
    target without a config has its family's; "" stands for all others."""
    make: Any = inspect.get_annotations(of.function, eval_str=True)["return"]
    try:
        rules = []
        for rule in table["rules"]:
            unknown = set(rule["when"]) - set(of.facts)
            if unknown:
                raise TilesError(f"{of.name} has no fact {', '.join(sorted(unknown))}")
            configs = {}
            for target, numbers in rule["targets"].items():
                if target:
                    Capabilities.of(target)
                fields = dict(zip(table["config"], numbers, strict=True))
                of.check(fields)
                configs[target] = make(**fields)
            rules.append(
                _Rule({of.facts.index(name): wanted for name, wanted in rule["when"].items()}, configs)
            )
        return rules
    except (KeyError, TypeError, ValueError) as error:
        raise TilesError(f"{path}: {error}") from error


# ---- files of what was tuned ------------------------------------------------------------------------------


def folder() -> Path | None:
    """Return the folder of the devices' files; None if `WEFT_CHOICES` is empty or names one file."""
    override = os.environ.get(VARIABLE)
    if override is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache, "weft", "tuned")
    return (
        Path(override)
        if override and not Path(override).is_file() and Path(override).suffix != ".json"
        else None
    )


def path_for(device: str) -> Path:
    """Return the file of a device by its name: the one `WEFT_CHOICES` names, or one in the folder."""
    import triton

    directory = folder()
    if directory is None:
        override = os.environ[VARIABLE]
        if not override:
            raise TilesError(f"{VARIABLE} is empty, which disables tuning: unset it, or name a folder")
        return Path(override)
    return directory / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device).strip('-')}-{triton.__version__}.json"


@functools.cache
def tuned_for(target: str, device: str = "") -> Tuned:
    """Return what was tuned for a named device of this machine, or for a target. A file that cannot be used is ignored,
    with one warning."""
    if os.environ.get(VARIABLE) == "" or (folder() is not None and not device):
        return NOTHING_TUNED
    path = path_for(device)
    if not path.exists():
        if VARIABLE in os.environ and not Path(os.environ[VARIABLE]).exists():
            warnings.warn(
                f"{VARIABLE}={os.environ[VARIABLE]} is neither a file nor a folder, so nothing is tuned; `weft tune` "
                "writes it",
                stacklevel=2,
            )
        return NOTHING_TUNED
    try:
        header, entries = read(path)
    except TilesError as error:
        warnings.warn(f"{error}. The file is ignored: run `weft tune` again or remove it", stacklevel=2)
        return NOTHING_TUNED
    if header["target"] != target:
        return NOTHING_TUNED
    return Tuned({key: entry["config"] for key, entry in entries.items()}, path)


def header_for(target: str, device: str) -> dict[str, Any]:
    """Return the header of a file. One from another Weft or Triton is not used, since its kernels differ."""
    import triton

    return {
        "file": "weft tiles",
        "schema": SCHEMA,
        "triton": triton.__version__,
        "sources": bundle.sources(),
        "target": target,
        "device": device,
    }


def read(path: Path) -> tuple[dict[str, Any], dict[Key, dict[str, Any]]]:
    """Return (header, entries) of a file, each entry with its `config`; raise TilesError if it cannot be used here."""
    try:
        content = json.loads(path.read_text())
        header = header_for(content["target"], content["device"])
        lists = content["choices"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TilesError(f"{path} is not a file of `weft tune`: {type(error).__name__}: {error}") from error
    identity = {"file": "kind", "schema": "format", "triton": "Triton", "sources": "Weft"}
    for field, word in identity.items():
        if content.get(field) != header[field]:
            raise TilesError(
                f"{path} was made by or for another {word}: {content.get(field)}, not {header[field]}"
            )
    entries: dict[Key, dict[str, Any]] = {}
    try:
        for name, listed in lists:
            if name not in choices:
                raise TilesError(f"there is no choice {name!r}")
            for entry in listed:
                choices[name].check(entry["config"])
                entries[choices[name].key(entry["facts"])] = entry
    except (KeyError, TypeError, TilesError) as error:
        raise TilesError(f"{path}: {error}") from error
    return header, entries


def write(path: Path, target: str, device: str, entries: Mapping[Key, Mapping[str, Any] | None]) -> None:
    """Add entries to a file, or remove them if None. Its entries for other choices stay, unless they are from another
    Weft or Triton. Concurrent readers see the old file or the new one; writers wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        header = header_for(target, device)
        merged: dict[Key, dict[str, Any]] = {}
        if path.exists():
            try:
                before, merged = read(path)
                if before != header:
                    raise TilesError(f"{path} is for {before['device'] or before['target']}")
            except TilesError:
                merged = {}
        for (name, facts), entry in entries.items():
            merged.pop((name, facts), None)
            if entry is not None:
                named = dict(zip(choices[name].facts, facts, strict=True))
                merged[name, facts] = {"facts": named, **entry}
        by_name: dict[str, list[Any]] = {}
        for (name, _), entry in sorted(merged.items(), key=lambda item: (item[0][0], str(item[0][1]))):
            by_name.setdefault(name, []).append(entry)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            json.dump(header | {"choices": by_name}, file, indent=1)
            file.write("\n")
        os.replace(file.name, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, which excludes other processes."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
