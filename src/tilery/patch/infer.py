"""Generates with a model of transformers, patched, as it is or both in turns: times, memory, tokens and logits."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StoppingCriteria

from tilery import models
from tilery.base.errors import BadInput, require
from tilery.base.spec import dtype_name
from tilery.patch.apply import patch, unpatch
from tilery.patch.audits import Audit, audit

PATCHED, TORCH = "patched", "torch"
_MIB = 2**20
_PROFILED = 15  # kernels in the table of a profile

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    model: str  # a folder, a config.json, or a known model's name
    random_weights: bool = False
    arms: tuple[str, ...] = (PATCHED,)
    prompt: str | None = None
    mock_input_len: int = 128  # random tokens, where there is no prompt
    batch_size: int = 1
    new_tokens: int = 32
    warmup: int = 1
    runs: int = 3
    device: str | None = None  # a GPU if there is one
    dtype: str | None = None  # bf16 on a GPU, fp32 on a CPU
    profile: Path | None = None  # the trace's file

    @property
    def rounds(self) -> int:
        return self.warmup + self.runs


@dataclass(frozen=True)
class Arm:
    """Medians over the runs."""

    name: str
    first_token_ms: float
    tokens_per_s: float | None  # of all sequences, from the second token on
    total_ms: float
    peak_mib: float | None  # of a GPU's memory; a CPU does not say it


@dataclass(frozen=True)
class Comparison:
    """Both arms' greedy tokens, and their logits up to the first token that differs."""

    tokens: int
    equal: int
    first_difference: int | None  # the step, in any sequence
    steps: int  # whose logits are compared
    logits_max: float  # greatest |difference|
    logits_error: float  # rms of the difference / rms of torch's logits


@dataclass
class Inference:
    model: str
    dtype: str
    device: str
    prompt_tokens: int
    batch_size: int
    new_tokens: int
    weights_mib: float
    arms: list[Arm] = field(default_factory=list)
    comparison: Comparison | None = None
    patch: Any = None  # a PatchReport
    audit: Audit | None = None
    profile: list[tuple[str, int, float]] = field(default_factory=list)  # kernel, calls, ms by itself
    outputs: dict[str, list[str]] = field(default_factory=dict)  # arm -> text, or ids where there is no tokenizer

    def document(self) -> dict[str, Any]:
        return asdict(self)


def infer(request: Request, say: Say = lambda text: None, step: Callable[[], None] = lambda: None) -> Inference:
    """`say` is told what is under way, `step` that a generation is done: (warm-up + runs) for each arm."""
    require(request.new_tokens > 0 and request.runs > 0, "there must be a new token and a run at least")
    device = _device(request.device)
    dtype = _dtype(request.dtype, device)
    say(f"loading {request.model}")
    name, model = _model(request, device, dtype)
    tokenizer = _tokenizer(request)
    inputs = _inputs(request, model, tokenizer)
    found = Inference(
        name, dtype_name(dtype), str(device), inputs["input_ids"].shape[1], request.batch_size, request.new_tokens,
        sum(weight.nbytes for weight in {id(w): w for w in model.parameters()}.values()) / _MIB,
    )  # fmt: skip
    timed: dict[str, list[_Run]] = {arm: [] for arm in request.arms}
    for round_ in range(request.rounds):
        for arm in request.arms:
            say(f"{arm}, {'warm-up' if round_ < request.warmup else 'run'} {round_ + 1} of {request.rounds}")
            with _arm(model, arm) as report:
                found.patch = report or found.patch
                timed[arm].append(_generate(model, inputs, request, keep=len(request.arms) > 1))
            step()
    found.arms = [_medians(arm, runs[request.warmup :], request) for arm, runs in timed.items()]
    latest = {arm: runs[-1] for arm, runs in timed.items()}
    found.outputs = {arm: _texts(run.tokens, tokenizer) for arm, run in latest.items()}
    if len(latest) > 1:
        found.comparison = _compare(latest[PATCHED], latest[TORCH])
    _look(model, inputs, request, found, say)
    return found


def _look(model: PreTrainedModel, inputs: Any, request: Request, found: Inference, say: Say) -> None:
    """What is not timed: the audit of two tokens, and the profile."""
    arm = request.arms[0]
    with _arm(model, arm):
        if arm == PATCHED:
            say("auditing two tokens")
            with audit(strict=False) as found.audit:
                _generate(model, inputs, replace(request, new_tokens=2))
        if request.profile is not None:
            say("profiling")
            found.profile = _profile(model, inputs, request)


# What is run


def _device(name: str | None) -> torch.device:
    here = torch.cuda.is_available()
    device = torch.device(name or ("cuda" if here else "cpu"))
    require(device.type == "cpu" or (device.type == "cuda" and here), f"the device must be here, got {name!r}")
    return device


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    name = name or ("bf16" if device.type == "cuda" else "fp32")
    require(name in known, f"the dtype must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _model(request: Request, device: torch.device, dtype: torch.dtype) -> tuple[str, PreTrainedModel]:
    name, document = models.document(request.model)
    if request.random_weights:
        require("model_type" in document, f"the config of {request.model} must say its model_type")
        with _readable(request.model):
            config = transformers.AutoConfig.for_model(**document)
        torch.manual_seed(0)
        with torch.device(device):
            return name, AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    folder = Path(request.model)
    if not any(folder.glob("*.safetensors")):
        raise BadInput(
            f"the model must be a folder with *.safetensors, got {request.model!r}; "
            "--random-weights makes weights for its config"
        )
    with _readable(request.model):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return name, loaded.to(device).eval()  # type: ignore[arg-type]


@contextlib.contextmanager
def _readable(model: str) -> Iterator[None]:
    """What transformers says of a folder that it cannot read, as a sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"transformers {transformers.__version__} cannot read {model}: {error}") from None


def _tokenizer(request: Request) -> Any:
    folder = Path(request.model)
    if not (folder / "tokenizer_config.json").is_file():
        require(
            request.prompt is None,
            f"a prompt needs a tokenizer, and {request.model} holds no tokenizer_config.json; "
            "--mock-input-len takes random tokens",
        )
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _inputs(request: Request, model: PreTrainedModel, tokenizer: Any) -> dict[str, Tensor]:
    if request.prompt is not None:
        ids = tokenizer(request.prompt, return_tensors="pt")["input_ids"]
    else:
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, request.mock_input_len), generator=g)
    ids = ids.expand(request.batch_size, -1).contiguous().to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def _arm(model: PreTrainedModel, name: str) -> Iterator[Any]:
    if name == TORCH:
        yield None
        return
    report = patch(model, None, None, False, False)
    try:
        yield report
    finally:
        unpatch(model)


@dataclass(frozen=True)
class _Run:
    tokens: Tensor  # [B, new tokens]
    logits: Tensor | None  # fp32 [steps, B, vocabulary]
    times: list[float]  # seconds from the start to each token
    peak_mib: float | None


class _Clock(StoppingCriteria):
    """generate asks it after each token whether to stop."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self.times = wait, []  # type: tuple[Callable[[], None], list[float]]
        wait()
        self._start = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        self._wait()
        self.times.append(time.perf_counter() - self._start)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _generate(model: PreTrainedModel, inputs: dict[str, Tensor], request: Request, keep: bool = False) -> _Run:
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    clock = _Clock(torch.cuda.synchronize if on_gpu else lambda: None)
    pad = model.generation_config.pad_token_id  # type: ignore[union-attr]
    made: Any = model.generate(  # type: ignore[operator]
        **inputs, do_sample=False, max_new_tokens=request.new_tokens, min_new_tokens=request.new_tokens,
        pad_token_id=0 if pad is None else pad, stopping_criteria=[clock], return_dict_in_generate=True,
        output_logits=keep,
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated(model.device) / _MIB if on_gpu else None
    logits = torch.stack([each.float().cpu() for each in made.logits]) if keep else None
    return _Run(made.sequences[:, inputs["input_ids"].shape[1] :].cpu(), logits, clock.times, peak)


def _medians(name: str, runs: list[_Run], request: Request) -> Arm:
    def median(of: Callable[[_Run], float]) -> float:
        return statistics.median(map(of, runs))

    later = request.new_tokens - 1
    rate = median(lambda run: request.batch_size * later / (run.times[-1] - run.times[0])) if later else None
    peak = max((run.peak_mib for run in runs if run.peak_mib is not None), default=None)
    first, total = median(lambda run: 1e3 * run.times[0]), median(lambda run: 1e3 * run.times[-1])
    return Arm(name, first, rate, total, peak)


def _compare(ours: _Run, theirs: _Run) -> Comparison:
    assert ours.logits is not None and theirs.logits is not None, "both are kept where there are two arms"
    alike = ours.tokens == theirs.tokens
    differs = (~alike.all(0)).nonzero()
    first = int(differs[0]) if len(differs) else None
    steps = alike.shape[1] if first is None else first + 1  # the logits that chose it saw the same tokens
    a, b = ours.logits[:steps], theirs.logits[:steps]
    error = float((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt())
    return Comparison(alike.numel(), int(alike.sum()), first, steps, float((a - b).abs().max()), error)


def _texts(tokens: Tensor, tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return [" ".join(map(str, row)) for row in tokens.tolist()]
    found: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return found


def _profile(model: PreTrainedModel, inputs: Any, request: Request) -> list[tuple[str, int, float]]:
    from torch.profiler import ProfilerActivity, profile

    on_gpu = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        _generate(model, inputs, request)
    profiled.export_chrome_trace(str(request.profile))
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(profiled.key_averages(), key=lambda row: -getattr(row, by))[:_PROFILED]
    return [(row.key, row.count, getattr(row, by) / 1e3) for row in rows]
