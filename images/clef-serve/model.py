"""A hybrid Qwen3.5 checkpoint on one device: greedy completions, classification heads, and a trace of its GDN layers.

Plain ``transformers`` on purpose: this is the reference that faster servers are compared with. Nothing is downloaded,
no code of the checkpoint is run, and a checkpoint that does not fill the model completely is refused.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

HEADS_FILE = "heads.json"
"""The side file of a checkpoint that names its classification heads; see ``read_heads``."""
FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3_next")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ModelError(Exception):
    """The checkpoint or the device cannot be used, or the model computed nonsense; one line for people."""


class RequestError(Exception):
    """A request that cannot be answered, by the client's own doing; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class CancelledError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """A token with its log probability (natural logarithm)."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One generated token, and the likeliest tokens in its place, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """``finish_reason`` is ``stop`` (end token or stop text) or ``length``."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One question that the model answers from the last token of a prompt.

    Either linear on the last hidden state (``weight`` [labels, hidden], ``bias`` [labels]), or a choice among tokens
    (``tokens``, one id for each label) by their logits.
    """

    name: str
    labels: tuple[str, ...]
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The label with the highest score; scores are probabilities (softmax) and add up to one."""

    head: str
    label: str
    scores: Mapping[str, float]


@dataclass(slots=True)
class Summary:
    """Sum and largest magnitude of everything that was added, in float64."""

    sum: float = 0.0
    absmax: float = 0.0
    count: int = 0

    def add(self, values: torch.Tensor) -> None:
        exact = values.detach().to(torch.float64)
        if exact.numel():
            self.sum += float(exact.sum())
            self.absmax = max(self.absmax, float(exact.abs().max()))
            self.count += exact.numel()

    def to_json(self) -> dict[str, float | int]:
        return {"sum": self.sum, "absmax": self.absmax, "count": self.count}


@dataclass(slots=True)
class LayerTrace:
    """What one GDN layer computed: beta, the delta rule's output, and the gated norm of it."""

    layer: int
    beta: Summary = field(default_factory=Summary)
    delta: Summary = field(default_factory=Summary)
    norm: Summary = field(default_factory=Summary)

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "beta": self.beta.to_json(),
            "delta": self.delta.to_json(),
            "norm": self.norm.to_json(),
        }


class Model:
    """Not safe for several threads at once: its user asks one question after the other."""

    def __init__(
        self,
        *,
        name: str,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: Sequence[Head],
        device: torch.device,
        context: int,
        end_ids: frozenset[int],
    ) -> None:
        self.name = name
        self.heads = tuple(heads)
        self.device = device
        self.context = context
        self.end_ids = end_ids
        self._network = network
        self._tokenizer = tokenizer
        self._layers = tuple(
            (index, module)
            for index, layer in enumerate(network.get_decoder().layers)
            if (module := getattr(layer, "linear_attn", None)) is not None
        )

    @classmethod
    def load(cls, path: Path, *, device: str = "auto", dtype: str | None = None, name: str | None = None) -> Model:
        """From a checkpoint folder (config.json, safetensors, tokenizer; heads.json where there is one).

        ``device`` is ``cpu``, ``cuda:N`` or ``auto``: one device, because the state of a GDN layer is not sharded.
        Raises ModelError.
        """
        place = choose_device(device)
        kind = DTYPES[dtype or ("float32" if place.type == "cpu" else "float16")]
        _check_folder(path)
        transformers_logging.disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            if config.model_type not in FAMILIES:
                raise ModelError(f"{path} is a {config.model_type}; this serves {', '.join(FAMILIES)}")
            network, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=kind,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be loaded: {error}") from error
        for what in ("missing_keys", "mismatched_keys"):
            names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info.get(what) or ())
            if names:
                raise ModelError(
                    f"{path} has {what.replace('_keys', '')} tensors: {', '.join(names[:3])} ({len(names)})"
                )
        network.eval()
        network.to(place)
        text = config.get_text_config()
        layers = getattr(text, "layer_types", ()) or ()
        if "linear_attention" not in layers:
            raise ModelError(f"{path} has no linear-attention layer: it is not a hybrid model")
        ends = network.generation_config.eos_token_id
        if ends is None:
            ends = text.eos_token_id
        end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        return cls(
            name=name or path.name,
            network=network,
            tokenizer=tokenizer,
            heads=read_heads(path, hidden=text.hidden_size, vocabulary=text.vocab_size, device=place),
            device=place,
            context=text.max_position_embeddings,
            end_ids=end_ids,
        )

    @property
    def dtype(self) -> str:
        return str(self._network.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        return int(self._network.get_output_embeddings().weight.shape[0])

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a text. Raises RequestError for a text without any."""
        ids = tuple(int(i) for i in self._tokenizer(prompt)["input_ids"])
        if not ids:
            raise RequestError("the prompt has no tokens", "prompt")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def check_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """``ids`` where each is a token. Raises RequestError."""
        wrong = next((i for i in ids if not 0 <= i < self.vocabulary), None)
        if not ids or wrong is not None:
            problem = "the prompt has no tokens" if wrong is None else f"there is no token {wrong}"
            raise RequestError(problem, "prompt")
        return tuple(ids)

    @torch.inference_mode()
    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        top: int = 0,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        cancelled: threading.Event | None = None,
    ) -> Completion:
        """Greedy: the likeliest token each time, the lowest id among equals. ``top`` alternatives per step are kept.

        A stop text is not part of the answer; an end token is not either. Raises RequestError where prompt and answer
        exceed the context, CancelledError once ``cancelled`` is set, ModelError where the logits are not finite.
        """
        self._check_length(len(prompt), max_tokens)
        ids: list[int] = []
        steps: list[Step] = []
        finish, text = "length", ""
        cache: Any = None
        pending = torch.tensor([list(prompt)], device=self.device)
        while len(ids) < max_tokens:
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            logits, cache = self._forward(pending, cache)
            chosen = int(torch.argmax(logits))
            if chosen in self.end_ids and not ignore_end:
                finish = "stop"
                break
            ids.append(chosen)
            steps.append(self._step(logits, chosen, top))
            text = self.decode(ids)
            cut = min((at for s in stop if (at := text.find(s)) >= 0), default=-1)
            if cut >= 0:
                text, finish = text[:cut], "stop"
                break
            pending = torch.tensor([[chosen]], device=self.device)
        return Completion(
            prompt_ids=tuple(prompt), token_ids=tuple(ids), text=text, finish_reason=finish, steps=tuple(steps)
        )

    @torch.inference_mode()
    def classify(self, prompt: Sequence[int]) -> tuple[Answer, ...]:
        """One answer for each head, all from one pass over the prompt. Raises RequestError, ModelError."""
        self._check_length(len(prompt), 0)
        if not self.heads:
            raise RequestError(f"model {self.name} has no {HEADS_FILE}, so it has no heads to ask")
        out = self._network(
            input_ids=torch.tensor([list(prompt)], device=self.device), use_cache=False, output_hidden_states=True
        )
        hidden = out.hidden_states[-1][0, -1].float()
        logits = out.logits[0, -1].float()
        return tuple(_answer(head, hidden, logits) for head in self.heads)

    @contextmanager
    def traced(self) -> Iterator[list[LayerTrace]]:
        """Fill the list with what each GDN layer computes meanwhile, summed over all passes.

        Hooks on the modules around the kernels see it all: ``in_proj_b`` gives b, whose sigmoid is beta; the gated
        norm takes the delta rule's output and gives its own.
        """
        traces = [LayerTrace(layer=index) for index, _ in self._layers]
        handles = []
        for trace, (_, module) in zip(traces, self._layers, strict=True):
            handles += [
                module.in_proj_b.register_forward_hook(_beta_hook(trace)),
                module.norm.register_forward_hook(_norm_hook(trace)),
            ]
        try:
            yield traces
        finally:
            for handle in handles:
                handle.remove()

    def _check_length(self, prompt: int, wanted: int) -> None:
        if prompt + wanted > self.context:
            raise RequestError(
                f"{prompt} prompt tokens and {wanted} more exceed the context of {self.context}", "max_tokens"
            )

    def _forward(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits [vocabulary] of the last position in float32, and the state to go on from."""
        out = self._network(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[0, -1].float()
        if not bool(torch.isfinite(logits).all()):
            raise ModelError("the model computed logits that are not finite")
        return logits, out.cache

    def _step(self, logits: torch.Tensor, chosen: int, top: int) -> Step:
        scores = torch.log_softmax(logits, dim=-1)

        def score(token: int) -> TokenScore:
            return TokenScore(token_id=token, text=self.decode([token]), logprob=float(scores[token]))

        best = torch.topk(scores, min(top, scores.shape[0])).indices.tolist() if top else []
        return Step(chosen=score(chosen), top=tuple(score(i) for i in best))


def _check_folder(path: Path) -> None:
    """Raises ModelError unless it is a folder with a config whose files this process may read.

    A container's user is seldom the one that wrote the files, and safetensors calls a closed file a missing one.
    """
    try:
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a checkpoint: it has no config.json")
        closed = sorted(f.name for f in path.iterdir() if not os.access(f, os.R_OK))
    except OSError as error:
        raise ModelError(f"{path}: user {os.getuid()}: {error.strerror}") from error
    if closed:
        raise ModelError(f"{path}: user {os.getuid()} may not read {', '.join(closed[:3])}")


def choose_device(wanted: str) -> torch.device:
    """One device. Raises ModelError where it is not there, or this torch has no code for it."""
    if wanted == "auto":
        wanted = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ModelError(f"{wanted!r} is not a device; write cpu or cuda:0") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {wanted} is not there")
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    native = any(a in built for a in (f"sm_{major}{m}" for m in range(minor + 1)))
    if not native and not any(
        a.startswith("compute_") and int(a[8:].rstrip("af")) <= 10 * major + minor for a in built
    ):
        raise ModelError(f"torch {torch.__version__} has no code for sm_{major}{minor}, only {', '.join(built)}")
    return device


def read_heads(path: Path, *, hidden: int, vocabulary: int, device: torch.device) -> tuple[Head, ...]:
    """The heads of a checkpoint, from its side file; none where it has none. Raises ModelError.

    ::

        {"heads": [{"name": "route", "labels": ["a", "b"], "weight": "route.weight", "bias": "route.bias"},
                   {"name": "mood", "labels": ["calm", "tense"], "tokens": [17, 23]}],
         "tensors": "heads.safetensors"}
    """
    file = path / HEADS_FILE
    if not file.is_file():
        return ()
    try:
        document = json.loads(file.read_text("utf-8"))
        entries = document["heads"]
        name = document.get("tensors")
        tensors = load_file(path / Path(str(name)).name) if name else {}
        heads = tuple(_head(e, tensors, hidden, vocabulary, device) for e in entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"{file}: {type(error).__name__}: {error}") from error
    if len({h.name for h in heads}) != len(heads):
        raise ModelError(f"{file}: two heads have one name")
    return heads


def _head(
    entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], hidden: int, vocabulary: int, device: torch.device
) -> Head:
    labels = tuple(str(label) for label in entry["labels"])
    tokens = tuple(int(i) for i in entry.get("tokens", ()))
    weight = tensors[entry["weight"]].float().to(device) if "weight" in entry else None
    bias = tensors[entry["bias"]].float().to(device) if "bias" in entry else None
    if not labels or len(set(labels)) != len(labels) or (weight is None) == (not tokens):
        raise ValueError(f"head {entry['name']!r} needs different labels, and either weight or tokens")
    if weight is not None and tuple(weight.shape) != (len(labels), hidden):
        raise ValueError(f"head {entry['name']!r} has a weight of {tuple(weight.shape)}, not {(len(labels), hidden)}")
    if bias is not None and tuple(bias.shape) != (len(labels),):
        raise ValueError(f"head {entry['name']!r} has a bias of {tuple(bias.shape)}, not {(len(labels),)}")
    if weight is None and (len(tokens) != len(labels) or not all(0 <= t < vocabulary for t in tokens)):
        raise ValueError(f"head {entry['name']!r} needs one token of the vocabulary for each label")
    return Head(name=str(entry["name"]), labels=labels, weight=weight, bias=bias, tokens=tokens)


def _answer(head: Head, hidden: torch.Tensor, logits: torch.Tensor) -> Answer:
    if head.weight is not None:
        raw = head.weight @ hidden
        if head.bias is not None:
            raw = raw + head.bias
    else:
        raw = logits[list(head.tokens)]
    if not bool(torch.isfinite(raw).all()):
        raise ModelError(f"head {head.name} computed scores that are not finite")
    scores = torch.softmax(raw, dim=-1).tolist()
    return Answer(
        head=head.name,
        label=head.labels[int(torch.argmax(raw))],
        scores=dict(zip(head.labels, scores, strict=True)),
    )


Hook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]


def _beta_hook(trace: LayerTrace) -> Hook:
    def hook(_module: torch.nn.Module, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        trace.beta.add(output.float().sigmoid())

    return hook


def _norm_hook(trace: LayerTrace) -> Hook:
    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        trace.delta.add(inputs[0])
        trace.norm.add(output)

    return hook
