"""The server level: ask a server that has loaded the probe checkpoint, and hold its answers against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from buildkit.errors import one_line
from buildkit.gdn import probe
from buildkit.gdn.compare import Verdict
from buildkit.gdn.signature import TIES, Answer, Exchange, Explanation, Place, diagnose, judge
from buildkit.smoke.client import Completions, Reply

LOGPROB_LIMITS = {"f32": 1e-3, "f16": 0.1, "bf16": 0.6}
"""Largest error of a log probability. The probe's logits have a standard deviation of 3: this is what ``TIES`` allows
for a difference of two logits, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One completion asked for, and what came of it. ``logprob_error`` is the largest, where the server gives them."""

    name: str
    prompt: str
    text: str
    verdict: Verdict
    wanted: str = ""
    tokens: int = 0
    identical: int = 0
    ties: int = 0
    first_wrong: int | None = None
    logprob_error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """The server level's outcome. ``ties`` counts places where two tokens were equally right."""

    url: str
    dtype: str
    verdict: Verdict
    reason: str
    model: str = ""
    questions: tuple[Question, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    diagnosis: tuple[str, ...] = ()

    @property
    def identical(self) -> int:
        return sum(question.identical for question in self.questions)

    @property
    def ties(self) -> int:
        return sum(question.ties for question in self.questions)


def check_server(
    client: Completions,
    dtype: str,
    *,
    model: str = "",
    say: Callable[[str], object] = lambda _: None,
) -> ServerReport:
    """Ask everything, judge it, and name the fault that explains what is wrong.

    Each prompt by itself, then the first one again (stale state shows there), then two at once. ``dtype`` is what the
    server computes in. Never raises for what the server does.
    """
    name, problem = (model, "") if model else client.find_model()
    if problem:
        return ServerReport(url=client.url, dtype=dtype, verdict=Verdict.FAIL, reason=problem, model=name)
    prompts = probe.prompts()
    questions, exchanges = [], []
    for label, prompt in [*((p.name, p) for p in prompts), (f"{prompts[0].name}, again", prompts[0])]:
        say(f"asking: {label}")
        question, answer = _judge(label, prompt, client.ask(prompt.text, probe.ANSWER), dtype)
        questions.append(question)
        if answer:
            exchanges.append(Exchange(prompt=prompt.tokens, answer=answer))
        elif len(questions) == 1:
            # Who cannot answer the first question is not asked seven, each with its time-out.
            return _report(client, name, dtype, questions, exchanges)
    say("asking: two at once")
    pair = prompts[1:3]
    with ThreadPoolExecutor(len(pair)) as pool:
        replies = list(pool.map(lambda p: client.ask(p.text, probe.ANSWER), pair))
    questions += [
        _judge(f"{prompt.name}, two at once", prompt, reply, dtype)[0]
        for prompt, reply in zip(pair, replies, strict=True)
    ]
    return _report(client, name, dtype, questions, exchanges)


def _judge(name: str, prompt: probe.Prompt, reply: Reply, dtype: str) -> tuple[Question, tuple[int, ...]]:
    """The question judged, and the tokens answered where they are known."""

    def question(verdict: Verdict, note: str) -> Question:
        return Question(name=name, prompt=prompt.text, text=one_line(reply.text, 200), verdict=verdict, note=note)

    if reply.problem:
        return question(Verdict.FAIL, reply.problem), ()
    tokens, note = _tokens(reply, prompt)
    if tokens is None:
        return question(Verdict.FAIL, note), ()
    notes = [reply.note, note]
    if not tokens:
        return question(Verdict.FAIL, "; ".join(filter(None, [*notes, "the answer is empty"]))), ()
    faults = [_text_fault(reply, prompt, tokens)]
    logprobs, fault = _logprobs(reply, prompt, len(tokens))
    faults.append(fault)
    if len(tokens) > probe.ANSWER:
        notes.append(f"answers {len(tokens)} tokens where {probe.ANSWER} were asked for")
        tokens = tokens[: probe.ANSWER]
    answer = judge(probe.model(), Exchange(prompt=prompt.tokens, answer=tokens), dtype)
    if len(tokens) < probe.ANSWER:
        faults.append(f"stops after {len(tokens)} of {probe.ANSWER} tokens")
    if answer.first_wrong is not None:
        at = answer.first_wrong
        notes.append(
            f"first divergence at token {at}: {probe.to_text(tokens[at : at + 1])!r} instead of "
            f"{probe.to_text(answer.wanted[at : at + 1])!r}"
        )
    error, fault, remark = _logprob_error(logprobs, answer, dtype)
    faults.append(fault)
    notes.append(remark)
    good = Place.WRONG not in answer.places and Place.UNKNOWN not in answer.places and not any(faults)
    result = Question(
        name=name,
        prompt=prompt.text,
        text=probe.to_text(tokens),
        verdict=Verdict.PASS if good else Verdict.FAIL,
        wanted=probe.to_text(answer.wanted),
        tokens=len(tokens),
        identical=answer.identical,
        ties=answer.ties,
        first_wrong=answer.first_wrong,
        logprob_error=error,
        note="; ".join(filter(None, [*faults, *notes])),
    )
    return result, tokens


def _tokens(reply: Reply, prompt: probe.Prompt) -> tuple[tuple[int, ...] | None, str]:
    """The tokens of an answer, and what is odd about it; None where it is not made of the probe's tokens alone."""
    if reply.ids is not None:
        if all(0 <= n < probe.VOCABULARY for n in reply.ids):
            return reply.ids, ""
        return None, "answers token ids that the probe does not have: has the server loaded another checkpoint?"
    text, note = _answer_text(reply, prompt)
    tokens = probe.to_tokens(text)
    if tokens is None:
        return None, (
            f"answers with text that is not the probe's: {one_line(reply.text, 80)!r}; the server adds text around its "
            "answers, or has loaded another checkpoint or tokenizer"
        )
    return tokens, note


def _answer_text(reply: Reply, prompt: probe.Prompt) -> tuple[str, str]:
    """The answer without what servers add and nobody minds, and what that was."""
    text = reply.text.strip()
    note = "white space around the answer was left out" if text != reply.text else ""
    if len(text) > probe.ANSWER and text.startswith(prompt.text):
        return text.removeprefix(prompt.text), "repeats the prompt before its answer"
    return text, note


def _text_fault(reply: Reply, prompt: probe.Prompt, tokens: tuple[int, ...]) -> str:
    """Where ids and text are given, whether they say the same. Tokens that are no character may be left out or not."""
    if reply.ids is None or any(token >= probe.END for token in tokens):
        return ""
    text, _ = _answer_text(reply, prompt)
    if text == probe.to_text(tokens):
        return ""
    return f"answers the text {one_line(text, 80)!r}, and token ids that mean {one_line(probe.to_text(tokens), 80)!r}"


def _logprobs(reply: Reply, prompt: probe.Prompt, count: int) -> tuple[tuple[float, ...] | None, str]:
    """The log probabilities of the ``count`` tokens answered, and what is wrong with them."""
    given = reply.logprobs
    if given is None:
        return None, ""
    if len(given) == len(prompt.tokens) + count and _answer_text(reply, prompt)[1].startswith("repeats"):
        given = given[len(prompt.tokens) :]
    if len(given) < count:
        return None, f"gives {len(given)} log probabilities for {count} tokens"
    known = tuple(number for number in given[:count] if number is not None)
    if len(known) < count:
        return None, f"gives no log probability for {count - len(known)} of {count} tokens"
    return known, ""


def _logprob_error(logprobs: tuple[float, ...] | None, answer: Answer, dtype: str) -> tuple[float | None, str, str]:
    """The largest error, what is wrong, and what is odd."""
    if logprobs is None:
        return None, "", ""
    got = np.array(logprobs[: len(answer.logprobs)])
    if not np.any(got):
        return None, "", "gives no real log probabilities: all are 0"
    error = float(np.max(np.abs(got - np.array(answer.logprobs)))) if np.all(np.isfinite(got)) else float("inf")
    limit = LOGPROB_LIMITS[dtype]
    if error > limit and answer.first_wrong is None:
        return error, f"log probabilities differ by up to {error:.3g}, {dtype} explains {limit:g}", ""
    return error, "", ""


def _report(
    client: Completions, model: str, dtype: str, questions: Sequence[Question], exchanges: Sequence[Exchange]
) -> ServerReport:
    failed = [question for question in questions if question.verdict is Verdict.FAIL]
    tokens, identical = sum(q.tokens for q in questions), sum(q.identical for q in questions)
    ties = sum(q.ties for q in questions)
    near = f", {ties} at near-ties of {TIES[dtype]:g} of the logits' size" if ties else ""
    report = ServerReport(
        url=client.url,
        dtype=dtype,
        verdict=Verdict.PASS,
        reason=f"{identical}/{tokens} tokens identical{near}",
        model=model,
        questions=tuple(questions),
    )
    if not failed:
        return report
    explanations: tuple[Explanation, ...] = ()
    if any(question.first_wrong is not None for question in failed):
        explanations = diagnose(probe.model(), exchanges, dtype)
    return ServerReport(
        url=report.url,
        dtype=dtype,
        verdict=Verdict.FAIL,
        reason=f"{report.reason}; {len(failed)} of {len(questions)} answers are wrong, first: {failed[0].name}: "
        f"{failed[0].note}",
        model=model,
        questions=report.questions,
        explanations=explanations,
        diagnosis=_diagnosis(failed, explanations),
    )


def _diagnosis(failed: Sequence[Question], explanations: Sequence[Explanation]) -> tuple[str, ...]:
    if explanations:
        return tuple(explanation.sentence for explanation in explanations)
    wrong = [question for question in failed if question.first_wrong is not None]
    if not wrong:
        return ()
    if all(question.name.endswith("two at once") for question in wrong):
        return ("only answers to requests at the same time are wrong: state is mixed up between sequences of a batch",)
    if all(question.name.endswith(("again", "two at once")) for question in wrong):
        return ("a prompt that was right is wrong when it is repeated: state of an earlier sequence is used again",)
    return (
        "no known fault gives these tokens: another fault, several at once, or a checkpoint that was loaded in part",
    )
