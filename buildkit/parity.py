"""Parity: the same requests to two services, and their answers compared field by field.

Cases are YAML::

    cases:
      - name: greeting
        path: /v1/completions
        body: {prompt: "Hello", max_tokens: 20, temperature: 0}
        compare:
          - {field: "choices[*].token_ids", rule: identical, as: token ids}
          - {field: trace.beta, rule: {relative: 1e-5}, as: beta}

A field is a path of keys and ``[index]``; ``*`` and ``[*]`` stand for all of them. Lists are compared element by
element. Rules: ``identical``; ``{relative: x}`` (|a - b| ≤ x·|b|, b the reference's); ``{absolute: x}``;
``{decimals: n}`` (equal when rounded to n places, half to even of the exact binary value).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import requests
import urllib3
import yaml
from rich.table import Table
from rich.text import Text

from buildkit.errors import NotFoundError, UsageError, one_line

MAX_CASES_FILE = 1 << 20
MAX_ANSWER = 16 << 20
"""Bytes of a cases file, and of an answer, that are read."""

RuleKind = Literal["identical", "relative", "absolute", "decimals"]
_EXACT = Context(prec=400)
"""Digits enough for the largest float with 30 decimals."""
_STEP = re.compile(r"\.?([A-Za-z0-9_$-]+|\*)|\[(\d+|\*)\]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How two values are compared; ``bound`` belongs to every kind but ``identical``."""

    kind: RuleKind
    bound: float = 0.0

    def holds(self, candidate: Any, reference: Any) -> bool:
        """Whether two single values agree. Numbers are compared as numbers (1 and 1.0 are identical), NaN with
        nothing."""
        if self.kind == "identical":
            return _is_number(candidate) == _is_number(reference) and bool(candidate == reference)
        if not _is_number(candidate) or not _is_number(reference):
            return False
        if not math.isfinite(candidate) or not math.isfinite(reference):
            return False
        if self.kind == "decimals":
            return _rounded(candidate, int(self.bound)) == _rounded(reference, int(self.bound))
        limit = self.bound * abs(reference) if self.kind == "relative" else self.bound
        return bool(abs(candidate - reference) <= limit)

    def __str__(self) -> str:
        return self.kind if self.kind == "identical" else f"{self.kind} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A field, the rule for it, and what it is called in reports."""

    field: str
    rule: Rule
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """One request and what to compare in its answers. ``body`` is JSON; None sends none."""

    name: str
    path: str
    method: str
    body: Any
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldParity:
    """One field of one case. ``same`` of ``total`` values agree; the pair shown is the worst. ``problem`` says why
    there was nothing to compare."""

    label: str
    field: str
    rule: str
    ok: bool
    same: int = 0
    total: int = 0
    candidate: Any = None
    reference: Any = None
    where: str = ""
    relative: float | None = None
    problem: str = ""

    def sentence(self) -> str:
        """As the reports of deployments have it: ``token ids 420/420 identical``, ``beta 8647.021 vs 8646.982``."""
        if self.problem:
            return f"{self.label}: {self.problem}"
        if self.rule == "identical" or self.total > 1:
            word = "identical" if self.rule == "identical" else f"within {self.rule}"
            text = f"{self.label} {self.same}/{self.total} {word}"
            return (
                text
                if self.ok
                else f"{text}, first at {self.where}: {_shown(self.candidate)} vs {_shown(self.reference)}"
            )
        difference = f" (relative {self.relative:.1e})" if self.relative is not None else ""
        return f"{self.label} {_shown(self.candidate)} vs {_shown(self.reference)}{difference}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseParity:
    """One case; ``problem`` where a service had no answer to compare."""

    name: str
    fields: tuple[FieldParity, ...] = ()
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and all(field.ok for field in self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """All cases. The URLs are as given, without credentials."""

    candidate: str
    reference: str
    cases: tuple[CaseParity, ...]

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases)

    def totals(self) -> tuple[str, ...]:
        """One sentence for each label over all cases, counts added up; single numbers as they are."""
        by_label: dict[str, list[FieldParity]] = {}
        for case in self.cases:
            for field in case.fields:
                by_label.setdefault(field.label, []).append(field)
        return tuple(_total(fields) for fields in by_label.values())

    def summary(self) -> str:
        """One line."""
        good = sum(case.ok for case in self.cases)
        return f"{good}/{len(self.cases)} cases agree: " + ", ".join(self.totals())

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "candidate": self.candidate,
            "reference": self.reference,
            "summary": self.summary(),
            "cases": [
                {
                    "name": case.name,
                    "ok": case.ok,
                    "problem": case.problem,
                    "fields": [_field_json(field) for field in case.fields],
                }
                for case in self.cases
            ],
        }

    def to_markdown(self) -> str:
        lines = [f"## Parity: {'agrees' if self.ok else 'DIFFERS'}", "", _cell(self.summary()), ""]
        lines += ["| case | field | rule | result | verdict |", "| --- | --- | --- | --- | --- |"]
        lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row, _ in self._rows()]
        return "\n".join([*lines, ""])

    def render(self) -> Table:
        """For a terminal."""
        table = Table("case", "field", "rule", "result", "verdict", title=self.summary(), title_justify="left")
        for row, ok in self._rows():
            table.add_row(*(Text(cell) for cell in row), style="" if ok else "bold red")
        return table

    def _rows(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        for case in self.cases:
            if case.problem:
                yield (case.name, "", "", case.problem, "FAIL"), False
            for field in case.fields:
                yield (case.name, field.field, field.rule, field.sentence(), "ok" if field.ok else "FAIL"), field.ok


# Comparing -----------------------------------------------------------------------------------------------------------


def compare(comparison: Comparison, candidate: Any, reference: Any) -> FieldParity:
    """One field of two answers. Pure."""
    start = FieldParity(label=comparison.label, field=comparison.field, rule=str(comparison.rule), ok=False)
    got, want = dict(_values(candidate, comparison.field)), dict(_values(reference, comparison.field))
    if not want:
        return _with(start, problem="the reference has no such field")
    if not got:
        return _with(start, problem="the candidate has no such field")
    if got.keys() != want.keys():
        where = min(got.keys() ^ want.keys())
        return _with(start, problem=f"{len(got)} values vs {len(want)}: only one of the two has {where}")
    same, worst = 0, ""
    worst_distance = -1.0
    for where, value in want.items():
        if comparison.rule.holds(got[where], value):
            same += 1
            distance = _distance(got[where], value)
        else:
            distance = math.inf
        if distance > worst_distance:
            worst, worst_distance = where, distance
    a, b = got[worst], want[worst]
    finite = _is_number(a) and _is_number(b) and math.isfinite(a) and math.isfinite(b)
    return FieldParity(
        label=start.label,
        field=start.field,
        rule=start.rule,
        ok=same == len(want),
        same=same,
        total=len(want),
        candidate=a,
        reference=b,
        where=worst,
        relative=abs(a - b) / abs(b) if finite and b else None,
    )


def _values(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All single values at ``path``, each with its own path; lists and objects at its end are walked through."""
    found: list[tuple[str, Any]] = [("", document)]
    for match in _STEP.finditer(path):
        key, index = match.groups()
        step = index if key is None else key
        found = [entry for where, value in found for entry in _step(where, value, step)]
    while found:
        nested = [
            entry for where, value in found if isinstance(value, (list, dict)) for entry in _step(where, value, "*")
        ]
        yield from ((where, value) for where, value in found if not isinstance(value, (list, dict)))
        found = nested


def _step(where: str, value: Any, step: str) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        numbers = range(len(value)) if step == "*" else [int(step)] if step.isdecimal() else []
        return [(f"{where}[{n}]", value[n]) for n in numbers if n < len(value)]
    if isinstance(value, dict):
        keys = list(value) if step == "*" else [step] if step in value else []
        return [(f"{where}.{key}" if where else key, value[key]) for key in keys]
    return []


def _distance(a: Any, b: Any) -> float:
    if not _is_number(a) or not _is_number(b):
        return 0.0
    return float(abs(a - b) / abs(b) if b else abs(a - b))


def _is_number(value: Any) -> bool:
    """Numbers that a float can hold: JSON's integers have no end."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or value.bit_length() < 1000


def _rounded(value: float, places: int) -> Decimal:
    return Decimal(value).quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_EVEN, context=_EXACT)


def _with(field: FieldParity, *, problem: str) -> FieldParity:
    return FieldParity(label=field.label, field=field.field, rule=field.rule, ok=False, problem=problem)


def _total(fields: Sequence[FieldParity]) -> str:
    if len(fields) == 1 or any(field.problem for field in fields):
        return next((f for f in fields if f.problem), fields[0]).sentence()
    worst = next((field for field in fields if not field.ok), fields[0])
    same, total = sum(f.same for f in fields), sum(f.total for f in fields)
    joined = FieldParity(
        label=worst.label,
        field=worst.field,
        rule=worst.rule,
        ok=worst.ok,
        same=same,
        total=total,
        candidate=worst.candidate,
        reference=worst.reference,
        where=worst.where,
    )
    return joined.sentence()


def _field_json(field: FieldParity) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "label": field.label,
        "field": field.field,
        "rule": field.rule,
        "ok": field.ok,
        "same": field.same,
        "total": field.total,
        "candidate": finite(field.candidate),
        "reference": finite(field.reference),
        "where": field.where,
        "relative": field.relative,
        "problem": field.problem,
        "sentence": field.sentence(),
    }


def _shown(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else one_line(str(value), 60)


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# Cases ---------------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """Plain data only: no aliases, which can grow without bound, and no key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not allowed here", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_cases(path: Path) -> tuple[ParityCase, ...]:
    """The cases of a YAML file. Raises NotFoundError, or UsageError with file and dotted path."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CASES_FILE + 1)
    except OSError as error:
        raise NotFoundError(f"no cases file {path}: {error.strerror}") from error
    if len(raw) > MAX_CASES_FILE:
        raise UsageError(f"{path} is larger than {MAX_CASES_FILE} bytes")
    return parse_cases(raw, where=str(path))


def parse_cases(raw: bytes, *, where: str) -> tuple[ParityCase, ...]:
    """The cases from YAML. Raises UsageError naming ``where`` and the dotted path."""
    try:
        document = yaml.load(raw, _StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{where}:{line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is not YAML: {error}") from error
    top = _object(document, f"{where}:", {"cases"})
    cases = top.get("cases")
    if not isinstance(cases, list) or not cases:
        raise UsageError(f"{where}: cases: is not a list with at least one case")
    parsed = tuple(_case(case, f"{where}: cases[{n}]") for n, case in enumerate(cases))
    names = [case.name for case in parsed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: cases: the name {name!r} is there twice")
    return parsed


def _case(value: Any, where: str) -> ParityCase:
    entry = _object(value, where, {"name", "path", "method", "body", "compare"})
    path = entry.get("path")
    if not isinstance(path, str) or not path.startswith("/"):
        raise UsageError(f"{where}.path: {path!r} is not a path such as /v1/completions")
    method = entry.get("method", "POST" if "body" in entry else "GET")
    if method not in ("GET", "POST"):
        raise UsageError(f"{where}.method: {method!r} is not GET or POST")
    compared = entry.get("compare")
    if not isinstance(compared, list) or not compared:
        raise UsageError(f"{where}.compare: is not a list with at least one field")
    return ParityCase(
        name=str(entry.get("name") or path),
        path=path,
        method=method,
        body=entry.get("body"),
        comparisons=tuple(_comparison(item, f"{where}.compare[{n}]") for n, item in enumerate(compared)),
    )


def _comparison(value: Any, where: str) -> Comparison:
    entry = _object(value, where, {"field", "rule", "as"})
    field = entry.get("field")
    if not isinstance(field, str) or not field or "".join(m[0] for m in _STEP.finditer(field)) != field:
        raise UsageError(f"{where}.field: {field!r} is not a path such as choices[0].text")
    return Comparison(
        field=field, rule=_rule(entry.get("rule", "identical"), f"{where}.rule"), label=str(entry.get("as") or field)
    )


def _rule(value: Any, where: str) -> Rule:
    if value == "identical":
        return Rule(kind="identical")
    if isinstance(value, dict) and len(value) == 1:
        ((kind, bound),) = value.items()
        try:
            # 1e-5 is a text in YAML 1.1, which wants 1.0e-5
            number = float(bound) if isinstance(bound, str) or _is_number(bound) else math.nan
        except ValueError:
            number = math.nan
        whole = kind != "decimals" or (number == int(number) if math.isfinite(number) else False)
        if (
            kind in ("relative", "absolute", "decimals")
            and 0 <= number <= (30 if kind == "decimals" else 1e300)
            and whole
        ):
            return Rule(kind=kind, bound=number)
    raise UsageError(f"{where}: is not identical, {{relative: x}}, {{absolute: x}} or {{decimals: n}}")


def _object(value: Any, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a table of keys")
    for key in value:
        if key not in known:
            raise UsageError(
                f"{where} the key {one_line(str(key), 40)!r} is not known", hint=f"known: {', '.join(sorted(known))}"
            )
    return value


# Asking --------------------------------------------------------------------------------------------------------------


def run_parity(
    candidate: str,
    reference: str,
    cases: Sequence[ParityCase],
    *,
    timeout: float = 300.0,
    say: Callable[[str], object] = lambda _: None,
) -> ParityReport:
    """Send every case to both services, one after the other, and compare. ``timeout`` in seconds for one answer.

    A service that fails is in the report. Raises UsageError for a URL that is none.
    """
    services = (_service(candidate), _service(reference))
    done = []
    for case in cases:
        say(f"asking: {case.name}")
        done.append(_run(case, services, timeout))
    return ParityReport(candidate=services[0], reference=services[1], cases=tuple(done))


def _run(case: ParityCase, services: tuple[str, str], timeout: float) -> CaseParity:
    answers = []
    for who, url in zip(("candidate", "reference"), services, strict=True):
        answer, problem = _ask(case, url, timeout)
        if problem:
            return CaseParity(name=case.name, problem=f"{who}: {problem}")
        answers.append(answer)
    return CaseParity(name=case.name, fields=tuple(compare(c, *answers) for c in case.comparisons))


def _ask(case: ParityCase, url: str, timeout: float) -> tuple[Any, str]:
    """The decoded answer, or what went wrong."""
    try:
        with requests.request(
            case.method, url + case.path, json=case.body, timeout=(10.0, timeout), stream=True
        ) as response:
            raw: bytes = response.raw.read(MAX_ANSWER + 1, decode_content=True)
            status = response.status_code
        if status != 200:
            return None, f"{case.path} answers {status}: {one_line(raw[:400].decode('utf-8', 'replace'), 200)}"
        if len(raw) > MAX_ANSWER:
            return None, f"{case.path} answers more than {MAX_ANSWER} bytes"
        return json.loads(raw), ""
    except requests.Timeout:
        return None, f"{case.path} has not answered within {timeout:g} s"
    except ValueError:
        return None, f"{case.path} answers something else than JSON"
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, RecursionError) as error:
        return None, f"{case.path} broke off: {one_line(str(error), 200)}"


def _service(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise UsageError(f"{one_line(url, 100)!r} is not the URL of a service", hint="like http://127.0.0.1:8000")
    return url.rstrip("/")
