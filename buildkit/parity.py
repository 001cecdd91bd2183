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

import yaml
from rich.table import Table
from rich.text import Text

from buildkit.errors import UsageError, one_line
from buildkit.smoke.http import NoAnswerError, check_timeout, fetch, server_url

MAX_CASES_FILE = 1 << 20
MAX_ANSWER = 16 << 20
"""Bytes of a cases file, and of an answer, that are read."""

RuleKind = Literal["identical", "relative", "absolute", "decimals"]
MAX_DEPTH = 100
"""Lists and tables in each other, in a request's body."""
MAX_BITS = 1000
"""Of integers that are compared as numbers: a float holds them."""
_INDEX_DIGITS = 9
_EXACT = Context(prec=400)
"""Digits enough for the largest float with 30 decimals."""
_KEY = re.compile(r"[A-Za-z0-9_$-]+", re.ASCII)
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
        if not math.isfinite(candidate - reference):
            # The difference of two quarters is always finite, and quarters of numbers as large are exact.
            limit = self.bound * (abs(reference) / 4) if self.kind == "relative" else self.bound / 4
            return bool(abs(candidate / 4 - reference / 4) <= limit)
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
        """One sentence for each label over all cases, counts added up; single numbers as they are. What differs comes
        first."""
        by_label: dict[str, list[FieldParity]] = {}
        for case in self.cases:
            for field in case.fields:
                by_label.setdefault(field.label, []).append(field)
        return tuple(
            _total(fields) for fields in sorted(by_label.values(), key=lambda fields: all(f.ok for f in fields))
        )

    def summary(self) -> str:
        """One line, what is wrong first."""
        good = sum(case.ok for case in self.cases)
        problems = [f"{case.name}: {case.problem}" for case in self.cases if case.problem]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        words = [f"{_visible(problems[0])}{more}"] if problems else []
        return f"{good}/{len(self.cases)} cases agree: " + ", ".join([*words, *self.totals()])

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
        table = Table("case", "field", "rule", "result", "verdict", title=Text(self.summary()), title_justify="left")
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
    same, worst = 0, next(iter(want))
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
        relative=_finite(abs(a - b) / abs(b)) if finite and b else None,
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
        short = step.isdecimal() and len(step) <= _INDEX_DIGITS
        numbers = range(len(value)) if step == "*" else [int(step)] if short else []
        return [(f"{where}[{n}]", value[n]) for n in numbers if n < len(value)]
    if isinstance(value, dict):
        keys = list(value) if step == "*" else [step] if step in value else []
        return [(_joined(where, key), value[key]) for key in keys]
    return []


def _joined(where: str, key: str) -> str:
    """The path of a key: no two paths of one document are the same, and all can be shown."""
    if not _KEY.fullmatch(key):
        return f"{where}[{json.dumps(key)}]"
    return f"{where}.{key}" if where else key


def _distance(a: Any, b: Any) -> float:
    """How far apart two values are that agree; 0 for those that are no finite numbers."""
    if not _is_number(a) or not _is_number(b) or not math.isfinite(a) or not math.isfinite(b):
        return 0.0
    return float(abs(a - b) / abs(b) if b else abs(a - b))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    """Numbers that a float can hold: JSON's integers have no end."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or value.bit_length() < MAX_BITS


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
    return f"{value:.10g}" if isinstance(value, float) else one_line(_visible(str(value)[:200]), 60)


def _visible(text: str) -> str:
    """What cannot be printed, such as half of a surrogate pair, as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # PyYAML lets these through for a value that its tag does not allow, such as !!int "" or the 31st of June.
            kind = str(node.tag).rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"this is no {kind}", problem_mark=node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a list or a table", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_cases(path: Path) -> tuple[ParityCase, ...]:
    """The cases of a YAML file. Raises UsageError with file and dotted path, also where there is no such file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CASES_FILE + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"no cases file {path}: {getattr(error, 'strerror', None) or error}") from error
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
    if not isinstance(path, str) or not path.startswith("/") or not path.isprintable():
        raise UsageError(f"{where}.path: {one_line(repr(path), 100)} is not a path such as /v1/completions")
    method = entry.get("method", "POST" if "body" in entry else "GET")
    if method not in ("GET", "POST"):
        raise UsageError(f"{where}.method: {one_line(repr(method), 100)} is not GET or POST")
    compared = entry.get("compare")
    if not isinstance(compared, list) or not compared:
        raise UsageError(f"{where}.compare: is not a list with at least one field")
    body = entry.get("body")
    _check_json(body, f"{where}.body")
    return ParityCase(
        name=_text(entry.get("name"), f"{where}.name") or path,
        path=path,
        method=method,
        body=body,
        comparisons=tuple(_comparison(item, f"{where}.compare[{n}]") for n, item in enumerate(compared)),
    )


def _comparison(value: Any, where: str) -> Comparison:
    entry = _object(value, where, {"field", "rule", "as"})
    field = entry.get("field")
    if not isinstance(field, str) or not field or "".join(m[0] for m in _STEP.finditer(field)) != field:
        raise UsageError(f"{where}.field: {one_line(repr(field), 100)} is not a path such as choices[0].text")
    if any(len(match[2] or "") > _INDEX_DIGITS for match in _STEP.finditer(field)):
        raise UsageError(f"{where}.field: an index has more than {_INDEX_DIGITS} digits")
    return Comparison(
        field=field,
        rule=_rule(entry.get("rule", "identical"), f"{where}.rule"),
        label=_text(entry.get("as"), f"{where}.as") or field,
    )


def _text(value: Any, where: str) -> str:
    """A name, which YAML may have taken for a number. Raises UsageError for other things."""
    if value is None:
        return ""
    text = str(value) if isinstance(value, (str, float)) or (_is_number(value)) else ""
    if (not text and value != "") or not text.isprintable():
        raise UsageError(f"{where}: is not a text on one line", hint="quotes make a text of a date")
    return text


def _check_json(value: Any, where: str, depth: int = 0) -> None:
    """Raises UsageError, naming the place, for what YAML has and JSON has not (RFC 8259)."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{where}: is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(
                    f"{where}: the key {one_line(str(key), 40)!r} is no text, as JSON's keys are", hint="quote it"
                )
            _check_json(key, where, depth)
            _check_json(item, f"{where}{'.' + key if _KEY.fullmatch(key) else f'[{json.dumps(key)}]'}", depth + 1)
    elif isinstance(value, list):
        for n, item in enumerate(value):
            _check_json(item, f"{where}[{n}]", depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: the text holds half of a surrogate pair, which is no character") from error
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{where}: {value} is no number of JSON")
    elif isinstance(value, int):
        if value.bit_length() >= MAX_BITS:
            raise UsageError(f"{where}: is an integer of more than {MAX_BITS} bits")
    elif value is not None:
        kind = type(value).__name__
        raise UsageError(f"{where}: JSON has no {kind}", hint="quotes make a text of a date")


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

    A service that fails is in the report. Raises UsageError for a URL that is none, and for such a time.
    """
    services = (server_url(candidate, "service"), server_url(reference, "service"))
    check_timeout(timeout)
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
        answer = fetch(case.method, url + case.path, body=case.body, timeout=timeout, limit=MAX_ANSWER)
    except NoAnswerError as error:
        return None, f"{case.path} {error}"
    if answer.status != 200:
        text = answer.body[:400].decode("utf-8", "replace")
        return None, f"{case.path} answers {answer.status}: {one_line(text, 200)}"
    try:
        return json.loads(answer.body), ""
    except (ValueError, RecursionError):
        return None, f"{case.path} answers something else than JSON"
