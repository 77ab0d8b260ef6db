"""`tilery infer`: generates with a Hugging Face model, patched or not, and says how fast, what ran, and how alike."""

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilery.base.errors import BadInput
from tilery.cli import common
from tilery.cli.tables import Paragraph, Table, figure, key

if TYPE_CHECKING:
    from tilery.patch.infer import Comparison, Inference

_COLUMNS = (key("arm"), figure("first token ms"), figure("tokens/s"), figure("total ms"), figure("peak MiB"))


def infer(
    model: Annotated[
        str, typer.Option(metavar="PATH|CONFIG", help="A folder with safetensors, a config.json, or llama-8b …")
    ],
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Make weights for the config: no file of weights is needed.")
    ] = False,
    patch: Annotated[bool, typer.Option("--patch/--no-patch", help="Patched by tilery.patch, or as it is.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Both, in turns; compare tokens and logits.")] = False,
    prompt: Annotated[str | None, typer.Option(help="A text; every sequence of the batch has it.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds the text.")] = None,
    mock_input_len: Annotated[
        int | None, typer.Option(min=1, help="That many random tokens instead of a text; 128 if nothing is given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each, whatever they are.")] = 32,
    warmup: Annotated[int, typer.Option(min=0, help="Generations before the timed ones.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Timed generations; medians are shown.")] = 3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; bf16 on a GPU, else fp32.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Keep torch's trace, and show the kernels.")] = False,
    show_outputs: Annotated[bool, typer.Option("--show-outputs", help="Print what was generated.")] = False,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what --json prints to a file.")] = None,
    json: common.Json = False,
) -> None:  # fmt: skip
    """Generate with a Hugging Face model: time to first token, tokens/s, memory, and what ran in each layer."""
    from tilery.base import files
    from tilery.measure.result import document
    from tilery.patch import require_transformers

    require_transformers()
    from tilery.patch import infer as module

    common.require_writable(summary)
    arms = (module.PATCHED, module.TORCH) if compare else (module.PATCHED if patch else module.TORCH,)
    request = module.Request(
        model, random_weights, arms, _text(prompt, prompt_file, mock_input_len), mock_input_len or 128, batch_size,
        new_tokens, warmup, runs, device, dtype, _trace() if profile else None,
    )  # fmt: skip
    with common.progress(len(arms) * request.rounds) as (say, step):
        found = module.infer(request, say, step)
    told = document([], **found.document())
    if summary:
        files.write(summary, jsons.dumps(told, indent=1) + "\n")
    if json:
        print(jsons.dumps(told))
        return
    _print(found, request.profile, show_outputs)


def _text(prompt: str | None, file: Path | None, mock: int | None) -> str | None:
    if sum(given is not None for given in (prompt, file, mock)) > 1:
        raise BadInput("--prompt, --prompt-file and --mock-input-len exclude each other, got more than one")
    if file is None:
        return prompt
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--prompt-file must be a file of text, got {str(file)!r}: {error}") from None


def _trace() -> Path:
    """A new file in the data folder."""
    import time

    from tilery.base import settings

    folder = settings.get().data_dir / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"infer-{time.strftime('%Y%m%d-%H%M%S')}.json"


def _print(found: "Inference", trace: Path | None, show_outputs: bool) -> None:
    size = f"{found.batch_size} × {found.prompt_tokens} tokens, {found.new_tokens} new"
    title = f"{found.model} in {found.dtype} on {found.device} ({found.weights_mib:,.0f} MiB of weights): {size}"
    lines = [
        (arm.name, f"{arm.first_token_ms:,.1f}", common.number(arm.tokens_per_s, ",.1f"), f"{arm.total_ms:,.1f}",
         common.number(arm.peak_mib, ",.0f"))
        for arm in found.arms
    ]  # fmt: skip
    common.say(Table(title, _COLUMNS, lines))
    if found.audit is not None:
        common.say("", "audit of two more tokens")
        print(found.audit)
    if found.profile:
        rows = [(name, str(calls), f"{ms:,.2f}") for name, calls, ms in found.profile]
        common.say("", Table("profile", (key("kernel"), figure("calls"), figure("ms")), rows), f"trace: {trace}")
    for arm, texts in found.outputs.items() if show_outputs else ():
        common.say("", f"{arm} generated", *(Paragraph(text, indent=2) for text in texts))
    common.say("", _verdict(found))


def _verdict(found: "Inference") -> str:
    if found.comparison is None:
        (arm,) = found.arms
        rate = "" if arm.tokens_per_s is None else f", then {arm.tokens_per_s:,.1f} tokens/s"
        return f"{arm.name}: the first token after {arm.first_token_ms:,.1f} ms{rate}."
    ours, theirs = found.arms
    first = f"the first token comes {theirs.first_token_ms / ours.first_token_ms:.2f} × as fast as in torch"
    later = ""
    if ours.tokens_per_s and theirs.tokens_per_s:
        later = f", later ones {ours.tokens_per_s / theirs.tokens_per_s:.2f} ×"
    return f"Patched, {first}{later}. {_alike(found.comparison)}"


def _alike(found: "Comparison") -> str:
    if found.first_difference is None:
        tokens = f"All {found.tokens} tokens agree"
    else:
        tokens = f"{found.equal} of {found.tokens} tokens agree, and all before step {found.first_difference + 1}"
    steps = "in all steps" if found.first_difference is None else f"in the first {found.steps} steps"
    return f"{tokens}; {steps} logits differ by {found.logits_max:.1e} at most, {found.logits_error:.1e} of their rms."
