"""The op contract: what an op means, stated once. Dispatch, tests, bench, tuner and docs read it from here."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilery import dispatch, settings
from tilery.errors import BadInput, NoBackward, require
from tilery.indices import require_no_capture
from tilery.spec import Bucket, Case, Cost, TensorSpec, require_dense


class _Kind(NamedTuple):
    """What one parameter takes."""

    types: tuple[type, ...]
    tensor: bool
    decides: bool  # part of the plan's key; a runtime scalar is not

    def __str__(self) -> str:
        return " or ".join("None" if t is NoneType else t.__name__ for t in self.types)


_FP32_ERROR = 1e-6  # rms, of fp32 arithmetic, where an op has no fp32 results
_OUTLIER = 6  # so many times the rms error may be that of a single element
_modes = torch._C._len_torch_dispatch_stack
REGISTRY: dict[str, "Op"] = {}
LIBRARY = torch.library.Library("tilery", "FRAGMENT")  # not custom_op: its wrappers cost host time


@dataclass(eq=False, repr=False)
class Op:
    """Functions marked `specs` take the arguments with specs for tensors and without the runtime scalars."""

    reference: Callable[..., Any]  # plain torch in the dtype it is given; its signature and docstring are the op's
    check: Callable[..., None]  # specs -> raises BadInput
    outputs: Callable[..., tuple[TensorSpec, ...]]  # specs -> what dispatch allocates and a test poisons
    cost: Callable[..., Cost]  # specs
    bucket: Callable[..., Bucket]  # specs
    inputs: Callable[..., dict[str, Any]]  # case.params, device and seed -> arguments
    cases: dict[str, list[Case]]  # "test", "bench" for a GPU and "bench_cpu"
    # Greatest rms(out - ref) / rms(ref), by output dtype; or specs -> that, where a scalar allows more.
    allowed: dict[torch.dtype, float] | Callable[..., dict[torch.dtype, float]]
    kernels: tuple[str, ...]  # "language" or "language.variant", in order of preference
    baselines: dict[str, Callable[..., Any]]  # "baseline:..." -> what a user would run otherwise
    # Whether values are rounded to the narrowest input's dtype between steps, as attention's probabilities are. Else
    # they are rounded once, at the end, and what comes before is fp32.
    rounds_between: bool = False
    rows_cancel: bool = False  # whether terms as large as other rows cancel to nothing in some: see workbench/judge.py
    first: Callable[..., str | None] = lambda *specs: None  # specs -> the kernel to ask before the others, if any
    model_sizes: Callable[..., list[dict[str, int]]] = lambda model: []  # a model -> case params but m and dtype
    runtime: tuple[str, ...] = ()  # scalars that no decision depends on: not in the key, unseen by the functions above
    check_runtime: Callable[..., None] | None = None  # the `runtime` scalars, at every call -> raises BadInput
    mutates: tuple[str, ...] = ()  # tensors written in place; such an op is named `op_`
    # Complete arguments, tensors with their data -> raises BadInput for an integer that leads outside of a tensor.
    # Called with TILERY_CHECK_INDICES=1 alone; see indices.py.
    indices: Callable[..., None] | None = None
    # (args, outs, grads) -> a gradient or None per argument; calls other ops
    backward: Callable[..., Any] | None = None
    # Complete arguments -> why the backward cannot serve this call, in a sentence, or None; asked where one is wanted.
    backward_refusal: Callable[..., str | None] = lambda *args: None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.reference)
        self.name = self.reference.__name__
        self.signature = inspect.signature(self.reference)
        self.plans = dispatch.Plans()
        self.modules = {name: f"{self.reference.__module__}.{name.replace('.', '_')}_kernel" for name in self.kernels}
        hints = get_type_hints(self.reference)
        self.names = tuple(self.signature.parameters)
        self._defaults = {n: p.default for n, p in self.signature.parameters.items()}
        accepted = [_accepted(hints[n]) for n in self.names]
        self._kinds = tuple(_Kind(a, Tensor in a, n not in self.runtime) for a, n in zip(accepted, self.names))
        self._tensors = sum(kind.tensor for kind in self._kinds)
        assert all(kind.tensor for kind in self._kinds[: self._tensors]), f"{self.name}: tensors come before scalars"
        self.mutated = tuple(self.names.index(n) for n in self.mutates)
        self._spec_names = tuple(n for n, kind in zip(self.names, self._kinds) if kind.decides)
        self._register()
        REGISTRY[self.name] = self

    def _register(self) -> None:
        # The schema comes from the reference's annotations, so it is flat, fixed and written once.
        LIBRARY.define(self.name + torch.library.infer_schema(self.reference, mutates_args=self.mutates))
        LIBRARY.impl(self.name, self._library_call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilery::{self.name}", self.fake, lib=LIBRARY)
        if self.backward is None:
            LIBRARY.impl(self.name, self._refusing_autograd, "Autograd")
        else:
            guarded: Any = _Guarded(self._refuse_gradients)
            torch.library.register_autograd(
                f"tilery::{self.name}", self._backward, setup_context=self._save, lib=guarded
            )
        self.torch_op = getattr(torch.ops.tilery, self.name)

    def asked(self, specs: tuple[Any, ...]) -> tuple[str, ...]:
        """The kernels in the order of preference for this problem."""
        first = self.first(*specs)
        return self.kernels if first is None else (first, *(name for name in self.kernels if name != first))

    # Call path

    def __call__(
        self, *args: Any, backend: str | None = None, config: Any = None, out: Any = None, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling():  # first: what follows is not for a tracer
            require(backend is config is out is None, f"{self.name}: backend=, config= and out= are for eager calls")
            return self.torch_op(*args, **kwargs)
        if kwargs or len(args) != len(self.names):
            args = self.complete(args, kwargs)
        if backend is None and config is None:
            for plan in self.plans.recent:
                if plan.takes(args):
                    return plan(args, out)
        key = None if _interferes() else self._key(args, backend, config)
        if key is None:
            return self._unusual_call(args, backend, config, out)
        try:
            held = self.plans.get(key)
        except TypeError:  # a backend or config that cannot be hashed is none of ours: `plan` names it
            return self.plan(self.specs(args), backend, config)(args, out)
        if held is None and dispatch.before_plan is not None:
            dispatch.before_plan(self, args, backend, config)
        plan = held or self.plans.make(key, lambda: self.plan(self.specs(args), backend, config))
        if backend is None and config is None and (takes := self._guard(args)) is not None:
            self.plans.promote(key, plan, takes)
        return plan(args, out)

    def _key(self, args: tuple[Any, ...], backend: str | None, config: Any) -> tuple[Any, ...] | None:
        """What decides the plan; None unless every tensor is plain and no gradient has a say."""
        key: list[Any] = [backend, config]
        grad = torch.is_grad_enabled()
        try:
            for value, kind in zip(args, self._kinds):
                if kind.tensor and type(value) in (Tensor, Parameter):
                    if (grad and value.requires_grad) or value.is_neg():
                        return None
                    key += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0)
                elif type(value) in kind.types:
                    if type(value) is int and not _fits(value):
                        return None
                    key += [value] if kind.decides else []
                else:
                    return None
        except RuntimeError:  # sparse and nested tensors have no strides
            return None
        return tuple(key)

    def _guard(self, args: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], bool] | None:
        """Whether other arguments have this call's key, asked in 0.8 µs for two tensors, where a key takes 2.2 µs.

        Made only for calls with all tensors aligned, as nearly all are; None for the others. torch's guards compare the
        thread's dispatch keys too, which transforms and torch.jit.trace change; for modes it is asked here.
        """
        count = self._tensors
        present = tuple(i for i in range(count) if args[i] is not None)
        absent = tuple(i for i in range(count) if args[i] is None)
        first, leading = len(present), present == tuple(range(len(present)))
        tensors = tuple(args[i] for i in present)
        if any(t.data_ptr() % 16 for t in tensors):
            return None
        sizes, strides = ([list(f(t)) for t in tensors] for f in (Tensor.size, Tensor.stride))
        same = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore
        gradients = any(t.requires_grad for t in tensors)  # they have no say only while torch computes none
        scalars = [(i, kind.types, kind.decides, args[i]) for i, kind in enumerate(self._kinds) if i >= count]

        def takes(given: tuple[Any, ...]) -> bool:
            for i in absent:
                if given[i] is not None:
                    return False
            tensors = given[:first] if leading else tuple([given[i] for i in present])
            try:
                for t in tensors:
                    if (type(t) is not Tensor and type(t) is not Parameter) or t.is_nested or t.data_ptr() & 15:
                        return False  # of a nested one the guards would read sizes, which it has not
            except RuntimeError:  # no storage: torch.func's
                return False
            if _modes() or not same(*tensors) or forward_ad._current_level >= 0:
                return False
            if gradients and torch.is_grad_enabled():
                return False
            for i, types, decides, value in scalars:
                now = given[i]
                kind = type(now)
                if kind not in types or (now != value if decides else kind is int and not _fits(now)):
                    return False
            return True

        return takes

    def _unusual_call(self, args: tuple[Any, ...], backend: str | None, config: Any, out: Any) -> Any:
        """Bad input is named; tracers, subclasses and gradients go through torch's dispatcher."""
        args, given = self.bind(args), args
        if any(a is not b for a, b in zip(args, given)):  # NumPy's scalars are Python's now
            return self(*args, backend=backend, config=config, out=out)
        self._refuse_gradients(args)
        chosen = backend is not None or config is not None or out is not None
        require(not chosen, f"{self.name}: backend=, config= and out= are for plain tensors without gradients")
        return self.torch_op(*args)

    def plan(self, specs: tuple[Any, ...], backend: str | None = None, config: Any = None) -> "dispatch.Plan":
        """Decides kernel and config from metadata alone; an engine may hold the plan and skip the lookup."""
        for name, spec in zip(self._spec_names, specs):
            if isinstance(spec, TensorSpec) and spec.device.type == "meta":
                hint = f"torch.ops.tilery.{self.name} infers shapes from meta tensors"
                raise BadInput(f"{self.name}: {name} must hold data, got a meta tensor; {hint}")
        self.validate(specs)
        return dispatch.decide(self, specs, backend, config)

    def validate(self, specs: tuple[Any, ...]) -> None:
        """What every op asks of its tensors, then what this op asks."""
        tensors = [(n, s) for n, s in zip(self._spec_names, specs) if isinstance(s, TensorSpec)]
        devices = {s.device for _, s in tensors}
        if len(devices) != 1:
            where = ", ".join(f"{n} on {s.device}" for n, s in tensors)
            raise BadInput(f"{self.name}: all tensors must be on one device, got {where}")
        for name, spec in tensors:
            for dim, (size, stride) in enumerate(zip(spec.shape, spec.strides)):
                if stride == 0 and size > 1:
                    raise BadInput(
                        f"{self.name}: {name} must not be expanded, got stride 0 along dimension {dim} "
                        f"of size {size}; call .contiguous() on it"
                    )
        try:
            self.check(*specs)
        except BadInput as error:
            raise BadInput(f"{self.name}: {error}") from None

    def checks_at_calls(self) -> Callable[[tuple[Any, ...]], None] | None:
        """What is checked at every call and not in the plan: runtime scalars and, if the settings ask, indices."""
        check, indices = self.check_runtime, self.indices if settings.get().check_indices else None
        if check is None and indices is None:
            return None
        where = [self.names.index(n) for n in self.runtime]
        scalars = slice(min(where, default=0), max(where, default=-1) + 1)
        assert len(where) == len(self.names[scalars]), f"{self.name}: runtime scalars stand side by side"

        accepted: tuple[Any, ...] | None = None  # the latest: most calls pass the same again

        def checks(args: tuple[Any, ...]) -> None:
            nonlocal accepted
            given = args[scalars]
            try:
                if check is not None and given != accepted:
                    check(*given)
                    accepted = given
                if indices is not None:
                    require_no_capture()
                    indices(*args)
            except BadInput as error:
                raise BadInput(f"{self.name}: {error}") from None

        return checks

    def tolerance(self, specs: tuple[Any, ...]) -> dict[torch.dtype, float]:
        return self.allowed(*specs) if callable(self.allowed) else self.allowed

    def slack(self, specs: tuple[Any, ...]) -> dict[torch.dtype, float]:
        """What an element may be off by besides its last rounding, of its own size and its row's rms together."""
        allowed = self.tolerance(specs)
        wide = allowed.get(torch.float32, _FP32_ERROR)
        if self.rounds_between:
            given = [allowed[s.dtype] for s in specs if isinstance(s, TensorSpec) and s.dtype in allowed]
            return {dtype: _OUTLIER * max(given, default=most) for dtype, most in allowed.items()}
        return {dtype: _OUTLIER * min(most, wide) for dtype, most in allowed.items()}

    def kernel(self, name: str) -> ModuleType:
        """The kernel's module, imported on first use."""
        return dispatch.load_kernel(self, name)

    def add_kernel(self, name: str, module: str) -> None:
        """Hangs a third party's kernel below this op, after the ones that are there."""
        require(
            name not in self.modules, f"{self.name}: there is a kernel {name!r} already, in {self.modules.get(name)}"
        )
        self.modules[name] = module
        self.kernels = (*self.kernels, name)
        self.plans.clear()

    @property
    def folder(self) -> Path:
        """Where the contract lies, and beside it the kernels and the tuned configs that are shipped."""
        return Path(inspect.getfile(self.reference)).parent

    def __repr__(self) -> str:
        return f"<tilery op {self.name}{self.signature}>"

    def __reduce__(self) -> Any:
        """A copy or a pickle of an op is the op: a module that holds one can be copied."""
        return _named, (self.name,)

    # Arguments

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Every argument in signature order, defaults filled in."""
        rest = [kwargs.get(n, self._defaults[n]) for n in self.names[len(args) :]]
        if len(args) + len(rest) == len(self.names) and not any(v is inspect.Parameter.empty for v in rest):
            given = sum(n in kwargs for n in self.names[len(args) :])
            if given == len(kwargs):
                return (*args, *rest)
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadInput(f"{self.name}: {error}; it takes {self.signature}") from None
        raise AssertionError("a call that binds was not completed")

    def bind(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, each of the kind the signature says and, if a tensor, one that holds dense data."""
        for name, kind, value in zip(self.names, self._kinds, args, strict=True):
            if not isinstance(value, kind.types):
                raise BadInput(f"{self.name}: {name} must be {kind}, got {type(value).__name__}")
            if isinstance(value, Tensor):
                require_dense(f"{self.name}: {name}", value)
            if isinstance(value, int) and not _fits(value):
                raise BadInput(f"{self.name}: {name} must be an integer of 64 bits, got {value}")
        return tuple(_plain_scalar(a, k) for a, k in zip(args, self._kinds))

    def specs(self, args: tuple[Any, ...], aligned: bool | None = None) -> tuple[Any, ...]:
        return tuple(
            TensorSpec.of(a, aligned) if isinstance(a, Tensor) else a for a, k in zip(args, self._kinds) if k.decides
        )

    # torch.library

    def _library_call(self, *args: Any) -> Any:
        args = self.bind(self.complete(args, {}))
        specs = self.specs(args)
        key = (None, None, specs)
        if dispatch.before_plan is not None and self.plans.get(key) is None:
            dispatch.before_plan(self, args, None, None)
        return (self.plans.get(key) or self.plans.make(key, lambda: self.plan(specs)))(args, None)

    def fake(self, *args: Any) -> Any:
        # Not `bind`: a tracer may pass symbolic scalars. A tensor without data counts as freshly allocated.
        specs = self.specs(self.complete(args, {}), aligned=True)
        self.validate(specs)
        return dispatch.unpacked(tuple(spec.empty() for spec in self.outputs(*specs)))

    def _refusing_autograd(self, *args: Any) -> Any:
        self._refuse_gradients(args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.torch_op(*args)

    def _refuse_gradients(self, args: tuple[Any, ...]) -> None:
        """Raise NoBackward where a gradient is asked for that this op does not have, or not for these arguments."""
        tensors = [(n, v) for n, v in zip(self.names, args) if isinstance(v, Tensor)]
        if forward_ad._current_level >= 0:
            for name, value in tensors:
                if forward_ad.unpack_dual(value).tangent is not None:
                    raise NoBackward(
                        f"{self.name} has no forward-mode derivative and {name} carries a tangent; "
                        "use reverse mode (backward, torch.autograd.grad), or pass its primal"
                    )
        graded = [n for n, v in tensors if v.requires_grad] if torch.is_grad_enabled() else []
        if not graded:
            return
        instead = f"call it under torch.no_grad() or pass {graded[0]}.detach()"
        if self.backward is None:
            raise NoBackward(f"{self.name} has no backward and {graded[0]} requires grad; {instead}")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NoBackward(
                f"{self.name} is not differentiated by torch.func; use backward or torch.autograd.grad, or {instead}"
            )
        if why := self.backward_refusal(*self.complete(args, {})):
            raise NoBackward(f"{self.name}: {why}, and {graded[0]} requires grad; {instead}")

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outs = dispatch.packed(output)
        ctx.scalars = tuple(None if isinstance(v, Tensor) else v for v in inputs)
        ctx.tensors = tuple(isinstance(v, Tensor) for v in inputs)
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)), *outs)

    def _backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        assert self.backward is not None
        saved = iter(ctx.saved_tensors)
        args = tuple(next(saved) if is_tensor else v for is_tensor, v in zip(ctx.tensors, ctx.scalars))
        # Autograd hands out expanded gradients, of a sum say; ops take none.
        return self.backward(args, tuple(saved), tuple(g if g is None else g.contiguous() for g in grads))


class _Guarded(NamedTuple):
    """What `register_autograd` takes for a library: the kernel that it makes is asked for after a check."""

    check: Callable[[tuple[Any, ...]], None]

    def impl(self, name: str, kernel: Callable[..., Any], key: str, with_keyset: bool) -> None:
        def guarded(keyset: Any, *args: Any) -> Any:
            self.check(args)
            return kernel(keyset, *args)

        LIBRARY.impl(name, guarded, key, with_keyset=with_keyset)


def _interferes() -> bool:
    """Whether a mode, a transform, torch.jit.trace or forward-mode AD must see the call."""
    return bool(
        _modes()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _fits(value: int) -> bool:
    """Whether an integer has 64 bits at most."""
    return -(2**63) <= value < 2**63


def _accepted(hint: Any) -> tuple[type, ...]:
    """Tensor | None -> (Tensor, NoneType); float also takes an int."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return (*types, int) if float in types else tuple(types)


def _plain_scalar(value: Any, kind: _Kind) -> Any:
    """np.float64 is a float and True an int, but not by their own type: made what the parameter takes."""
    if type(value) in kind.types or isinstance(value, Tensor):
        return value
    return next((plain(value) for plain in (float, int) if plain in kind.types and isinstance(value, plain)), value)


def _named(name: str) -> "Op":
    import tilery.ops  # noqa: F401  fills the registry

    return REGISTRY[name]


def op(**contract: Any) -> Callable[[Callable[..., Any]], Op]:
    return lambda reference: Op(reference, **contract)
