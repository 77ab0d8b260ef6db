"""torch.library: every op is torch.ops.tilery.<op>, with a fake for tracers and its backward for autograd."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilery.base.errors import NoBackward
from tilery.core import plan as plans
from tilery.core import policy
from tilery.core.call import Call

if TYPE_CHECKING:
    from tilery.core.op import Op

LIBRARY = torch.library.Library("tilery", "FRAGMENT")  # not custom_op: its wrappers cost host time


def register(op: "Op") -> Any:
    """Define the op, whose schema comes from its reference's annotations: flat, fixed and written once."""
    LIBRARY.define(op.name + torch.library.infer_schema(op.reference, mutates_args=op.mutates))
    LIBRARY.impl(op.name, _call(op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilery::{op.name}", _fake(op), lib=LIBRARY)
    if op.backward is None:
        LIBRARY.impl(op.name, _refusing_autograd(op), "Autograd")
    else:
        guarded: Any = _Guarded(lambda args: refuse_gradients(op, args))
        torch.library.register_autograd(f"tilery::{op.name}", _backward(op), setup_context=_save, lib=guarded)
    return getattr(torch.ops.tilery, op.name)


def _call(op: "Op") -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        args = op.signature.bind(op.complete(args, {}))
        specs = op.specs(args)
        key = (None, None, specs)
        if policy.before_plan is not None and op.plans.get(key) is None:
            policy.before_plan(op, args, None, None)
        return (op.plans.get(key) or op.plans.make(key, lambda: op.plan(specs)))(args, None)

    return call


def _fake(op: "Op") -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        # Not `bind`: a tracer may pass symbolic scalars. A tensor without data counts as freshly allocated.
        call = op.call(op.signature.specs(op.complete(args, {}), aligned=True))
        return plans.unpacked(tuple(spec.empty() for spec in op.output_specs(call)))

    return fake


# Gradients


def _refusing_autograd(op: "Op") -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        refuse_gradients(op, args)
        with torch._C._AutoDispatchBelowAutograd():
            return op.torch_op(*args)

    return call


def refuse_gradients(op: "Op", args: tuple[Any, ...]) -> None:
    """Raise NoBackward where a gradient is asked for that this op does not have, or not for these arguments."""
    tensors = [(n, v) for n, v in zip(op.names, args) if isinstance(v, Tensor)]
    if forward_ad._current_level >= 0:
        for name, value in tensors:
            if forward_ad.unpack_dual(value).tangent is not None:
                raise NoBackward(
                    f"{op.name} has no forward-mode derivative and {name} carries a tangent; "
                    "use reverse mode (backward, torch.autograd.grad), or pass its primal"
                )
    graded = [n for n, v in tensors if v.requires_grad] if torch.is_grad_enabled() else []
    if not graded:
        return
    instead = f"call it under torch.no_grad() or pass {graded[0]}.detach()"
    if op.backward is None:
        raise NoBackward(f"{op.name} has no backward and {graded[0]} requires grad; {instead}")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NoBackward(
            f"{op.name} is not differentiated by torch.func; use backward or torch.autograd.grad, or {instead}"
        )
    if why := op.backward_refusal(op.given(op.complete(args, {}))):
        raise NoBackward(f"{op.name}: {why}, and {graded[0]} requires grad; {instead}")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.scalars = tuple(None if isinstance(v, Tensor) else v for v in inputs)
    ctx.tensors = tuple(isinstance(v, Tensor) for v in inputs)
    ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)), *plans.packed(output))


def _backward(op: "Op") -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        assert op.backward is not None
        saved = iter(ctx.saved_tensors)
        args = tuple(next(saved) if is_tensor else v for is_tensor, v in zip(ctx.tensors, ctx.scalars))
        # Autograd hands out expanded gradients, of a sum say; ops take none.
        dense = [g if g is None else g.contiguous() for g in grads]
        call = op.given(args, tuple(saved))
        needed = frozenset(name for name, is_needed in zip(op.names, ctx.needs_input_grad) if is_needed)
        found: dict[str, Any] = op.backward(call, Call(dict(zip(op.output_names, dense)) | {"needed": needed}))
        unknown = set(found) - set(op.names)
        assert not unknown, f"{op.name}: gradients of {', '.join(unknown)}, which it does not have"
        return tuple(found.get(name) for name in op.names)

    return backward


class _Guarded(NamedTuple):
    """What `register_autograd` takes for a library: the kernel that it makes is asked for after a check."""

    check: Callable[[tuple[Any, ...]], None]

    def impl(self, name: str, kernel: Callable[..., Any], key: str, with_keyset: bool) -> None:
        def guarded(keyset: Any, *args: Any) -> Any:
            self.check(args)
            return kernel(keyset, *args)

        LIBRARY.impl(name, guarded, key, with_keyset=with_keyset)
