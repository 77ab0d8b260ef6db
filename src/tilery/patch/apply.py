"""Patches a model by the table of its architecture, and takes the patch back."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tilery.base.errors import BadInput, require
from tilery.base.spec import dtype_name
from tilery.core.op import REGISTRY
from tilery.patch import swap, verify
from tilery.patch.application import OPS, PAGED, RECORD, Application, Record
from tilery.patch.architectures import ARCHITECTURES, PIECES, USUAL, Architecture
from tilery.patch.attention import BACKENDS
from tilery.patch.report import PatchReport

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def patch(
    model: PreTrainedModel, ops: str | Iterable[str] | None, backend: str | Mapping[str, str] | None,
    strict: bool, proven: bool,
) -> PatchReport:  # fmt: skip
    known = _architecture(model)
    pieces = _pieces(ops)
    _require_patchable(model)
    record = Record(PatchReport(model.config.model_type), strict, pieces)
    made = Application(model, known, record, _backends(backend))
    targets = made.targets() if proven else {}
    truths = verify.truths(model, targets) if proven else []
    vars(model)[RECORD] = record
    try:
        made.run()
        left = [e for e in record.report.left if e.piece]
        if strict and left:
            said = "\n".join(f"  {e.piece} of {e.count} {e.module}: {e.why}" for e in left)
            raise BadInput(f"strict=True, and of what was asked for this cannot be patched:\n{said}")
        if proven:
            record.report.errors = verify.errors(model, targets, truths)
    except BaseException:
        unpatch(model)
        raise
    return record.report


def unpatch(model: PreTrainedModel) -> None:
    """Bit for bit what it was; its config stays a copy of the one that it came with."""
    require(RECORD in vars(model), f"the model is not patched: {type(model).__name__}; tilery.patch(model) does that")
    record: Record = vars(model)[RECORD]
    for module, _ in reversed(record.modules.values()):
        if module.tilery_patch.joined is not None:
            module.tilery_patch.joined.split(module)
        swap.restore_forward(module)
    for module in model.modules():
        vars(module).pop(BACKENDS, None)
    if record.attention is not None:
        model.set_attn_implementation(record.attention)
    for name in PAGED:
        vars(model).pop(name, None)
    del vars(model)[RECORD]


# What is asked for


def _architecture(model: Any) -> Architecture:
    require(isinstance(model, PreTrainedModel), f"model must be a model of transformers, got {type(model).__name__}")
    require(RECORD not in vars(model), "the model is patched already; tilery.unpatch(model) takes the patch back")
    name = model.config.model_type
    if name not in ARCHITECTURES:
        raise BadInput(
            f"the architecture {name!r} is not known; known are {', '.join(ARCHITECTURES)}. Its attention may still "
            "run: tilery.register_attention(), then model.set_attn_implementation('tilery')"
        )
    return ARCHITECTURES[name]


def _pieces(ops: str | Iterable[str] | None) -> tuple[str, ...]:
    asked = USUAL if ops is None else (ops,) if isinstance(ops, str) else tuple(ops)
    for name in asked:
        require(name in PIECES, f"ops must be some of {', '.join(PIECES)}, got {name!r}")
    return asked


def _require_patchable(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        require(not weight.is_meta, f"the model must have its weights, {name} is on the meta device")
        floats = weight.is_floating_point() and weight.dtype.itemsize > 1  # narrower ones are of quantised layers
        kinds = ", ".join(map(dtype_name, _DTYPES))
        require(not floats or weight.dtype in _DTYPES, f"weights must be {kinds}, {name} is {weight.dtype}")


def _backends(backend: str | Mapping[str, str] | None) -> dict[str, str]:
    """By op; one name is of all ops that a patch may call, each of which must have that kernel."""
    called = dict.fromkeys([*sum(OPS.values(), ()), "qk_norm_rope_", "linear_silu_mul", "silu_mul", "gelu_mul"])
    if backend is None:
        return {}
    given = dict.fromkeys(called, backend) if isinstance(backend, str) else dict(backend)
    for op, name in given.items():
        require(op in called, f"backend= names ops that a patch calls, {', '.join(called)}; got {op!r}")
        kernels = REGISTRY[op].kernels
        require(
            name in kernels,
            f"backend for {op} must be one of {', '.join(kernels)}, got {name!r}; "
            "backend={'" + op + "': …} names one for each op",
        )
    return given
