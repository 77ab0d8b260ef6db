"""`tilery plan`: every op and shape of a model, and what they would take at the roof."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import Table, figure, key, long

if TYPE_CHECKING:
    from tilery.models.model import Model
    from tilery.models.plan import PassPlan
    from tilery.models.roofs import Roof
    from tilery.models.steps import Step

_COLUMNS = (key("step"), key("op"), long("shape"), *map(figure, ("calls", "FLOP", "bytes", "roof µs", "share")))


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="llama-8b, deepseek-v3 …, a config.json or its folder.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism; the plan is of one of them.")] = 1,
    batch: Annotated[str, typer.Option(help="Numbers of sequences, separated by commas.")] = "1,16,64",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, in prefill.")] = 512,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each new one sees, in decode.")] = 4096,
    device: Annotated[
        str | None, typer.Option(help="Whose ceilings: here, or h200. This machine's GPU, else an H200, if not given.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of linear layers: bf16 or fp8. What the config says, if not given.")
    ] = None,
    json: common.Json = False,
) -> None:
    """List every op and shape of a model's prefill and decode with its cost and its time at the roof; no weights."""
    from tilery import models
    from tilery.models import roofs
    from tilery.models.plan import plans

    batches = common.numbers("--batch", batch)
    chosen = models.load(model, tp, weights)
    roof = roofs.find(device)
    made = plans(chosen, roof, batches, prompt, context)
    if json:
        found, documents = {**asdict(roof.ceilings), "device": roof.device}, [each.document() for each in made]
        common.print_json([], model=chosen.name, tp=tp, weights=chosen.weights, ceilings=found, plans=documents)
        return
    common.say(_heading(chosen, roof))
    for each in made:
        common.say("", _table(each), f"ideal: {each.tokens_per_s:,.0f} tokens/s")
    common.say("", *_notes(chosen, made))


def _heading(model: "Model", roof: "Roof") -> str:
    ranks = "one GPU" if model.tp == 1 else f"one of {model.tp} GPUs"
    rates = f"{_short(roof.ceilings.read)}B/s, {_short(roof.ceilings.flops['bf16'])}FLOP/s"
    formats = "bf16" if model.weights == "bf16" else f"bf16 with {model.weights} weights"
    return f"{model.name} in {formats} on {ranks}, at the ceilings measured on {roof.device} ({rates})"


def _table(made: "PassPlan") -> Table:
    lines = [
        (
            step.name, step.op if step.exists else f"{step.op} *", _shape(step), str(step.count),
            _short(step.count * step.cost.flops), _short(step.count * step.cost.bytes),
            f"{1e3 * ms:.1f}", f"{share:.1%}",
        )
        for step, ms, share in zip(made.steps, made.step_ms, made.shares)
    ]  # fmt: skip
    calls = sum(step.count for step in made.steps)
    total = (_short(made.cost.flops), _short(made.cost.bytes), f"{1e3 * made.ms:.1f}", "100.0%")
    return Table(str(made.forward), _COLUMNS, [*lines, ("total", "", "", str(calls), *total)])


def _shape(step: "Step") -> str:
    """The heading says that it is bf16 where nothing is said."""
    return ",".join(f"{name}={value}" for name, value in step.case.params.items() if value != "bf16")


def _short(value: float) -> str:
    """Three digits and a prefix: 15.0 G."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}"


def _notes(model: "Model", made: "list[PassPlan]") -> list[str]:
    notes = ["FLOP, bytes and µs at the roof are of all calls of a step together."]
    if any(not step.exists for each in made for step in each.steps):
        notes.append("* not yet an op: its cost is an estimate.")
    if model.expert_layers:
        notes.append("Experts are taken to be equally likely: so many of them are read as get a token.")
    if model.tp > 1:
        notes.append(
            "all_reduce and all_gather are counted in a GPU's own memory: the links between GPUs have no ceiling."
        )
    return notes
