"""The op contract: what an op means, stated once. Dispatch, tests, bench, tuner and docs read it from here."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilery.base import settings
from tilery.base.errors import BadInput, require
from tilery.base.launch import Argument
from tilery.base.spec import Bucket, Case, Cost, TensorSpec
from tilery.core import library, plan, policy
from tilery.core.call import Call
from tilery.core.indices import require_no_capture
from tilery.core.kernel import Kernel
from tilery.core.signature import Signature, torch_interferes

_FP32_ERROR = 1e-6  # rms, of fp32 arithmetic, where an op has no fp32 results
_OUTLIER = 6  # so many times the rms error may be that of a single element
REGISTRY: dict[str, "Op"] = {}


@dataclass(eq=False, repr=False)
class Op:
    """One op. Its functions take a `Call` of specs, with the op's arguments by name, where nothing else is said."""

    reference: Callable[..., Any]  # plain torch in the dtype it is given; its signature and docstring are the op's
    check: Callable[[Any], None]  # raises BadInput
    outputs: Callable[[Any], Mapping[str, TensorSpec]]  # what dispatch allocates and a test poisons, by name
    cost: Callable[[Any], Cost]
    bucket: Callable[[Any], Bucket]
    inputs: Callable[..., dict[str, Any]]  # case.params, device and seed -> arguments
    cases: dict[str, list[Case]]  # "test", "bench" for a GPU and "bench_cpu"
    # Greatest rms(out - ref) / rms(ref), by output dtype; or a function of the call, where a scalar allows more.
    allowed: dict[torch.dtype, float] | Callable[[Any], dict[torch.dtype, float]]
    # "language" or "language.variant", in order of preference -> where it is: "module:name", beside the contract
    kernels: dict[str, str]
    baselines: dict[str, Callable[..., Any]]  # "baseline:..." -> what a user would run otherwise
    call_type: type[Call] = Call  # what the functions here and the kernels are given
    # Whether values are rounded to the narrowest input's dtype between steps, as attention's probabilities are. Else
    # they are rounded once, at the end, and what comes before is fp32.
    rounds_between: bool = False
    rows_cancel: bool = False  # whether terms as large as other rows cancel to nothing in some: see measure/judge.py
    first: Callable[[Any], str | None] = lambda call: None  # the kernel to ask before the others, if any
    model_sizes: Callable[..., list[dict[str, int]]] = lambda model: []  # a model -> case params but m and dtype
    runtime: tuple[str, ...] = ()  # scalars that no decision depends on: not in the key, unseen by the functions above
    check_runtime: Callable[..., None] | None = None  # the `runtime` scalars, by name, at every call -> raises BadInput
    mutates: tuple[str, ...] = ()  # tensors written in place; such an op is named `op_`
    # A call with its data -> raises BadInput for an integer that leads outside of a tensor. Called with
    # TILERY_CHECK_INDICES=1 alone; see indices.py.
    indices: Callable[[Any], None] | None = None
    # A call with its data, outputs among them, and gradients by the outputs' names -> gradients by the arguments'
    # names; it calls other ops. `needed` of the gradients names the arguments whose gradients are asked for.
    backward: Callable[[Any, Any], dict[str, Any]] | None = None
    # A call with its data -> why the backward cannot serve it, in a sentence, or None; asked where one is wanted.
    backward_refusal: Callable[[Any], str | None] = lambda call: None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.reference)
        self.name = self.reference.__name__
        self.package = self.reference.__module__.rpartition(".")[0]
        self.signature = Signature(self.name, self.reference, self.runtime)
        self.names = self.signature.names
        self.complete, self.specs = self.signature.complete, self.signature.specs
        self.mutated = tuple(self.names.index(n) for n in self.mutates)
        self.plans = plan.Plans()
        self._output_names: tuple[str, ...] | None = None
        self.torch_op = library.register(self)
        REGISTRY[self.name] = self

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
            for recent in self.plans.recent:
                if recent.takes(args):
                    return recent(args, out)
        key = None if torch_interferes() else self.signature.key(args, backend, config)
        if key is None:
            return self._unusual_call(args, backend, config, out)
        try:
            held = self.plans.get(key)
        except TypeError:  # a backend or config that cannot be hashed is none of ours: `plan` names it
            return self.plan(self.specs(args), backend, config)(args, out)
        if held is None and policy.before_plan is not None:
            policy.before_plan(self, args, backend, config)
        made = held or self.plans.make(key, lambda: self.plan(self.specs(args), backend, config))
        if backend is None and config is None and (takes := self.signature.guard(args)) is not None:
            self.plans.promote(key, made, takes)
        return made(args, out)

    def _unusual_call(self, args: tuple[Any, ...], backend: str | None, config: Any, out: Any) -> Any:
        """Bad input is named; tracers, subclasses and gradients go through torch's dispatcher."""
        args, given = self.signature.bind(args), args
        if any(a is not b for a, b in zip(args, given)):  # NumPy's scalars are Python's now
            return self(*args, backend=backend, config=config, out=out)
        library.refuse_gradients(self, args)
        chosen = backend is not None or config is not None or out is not None
        require(not chosen, f"{self.name}: backend=, config= and out= are for plain tensors without gradients")
        return self.torch_op(*args)

    def plan(self, specs: tuple[Any, ...], backend: str | None = None, config: Any = None) -> plan.Plan:
        """Decides kernel and config from metadata alone; an engine may hold the plan and skip the lookup."""
        for name, spec in zip(self.signature.decisive, specs):
            if isinstance(spec, TensorSpec) and spec.device.type == "meta":
                hint = f"torch.ops.tilery.{self.name} infers shapes from meta tensors"
                raise BadInput(f"{self.name}: {name} must hold data, got a meta tensor; {hint}")
        return policy.decide(self, self.call(specs), backend, config)

    # Calls

    def call(self, specs: tuple[Any, ...]) -> Any:
        """The call of these specs, which is checked, with its outputs."""
        found = self.call_type(self.signature.references(specs))
        self.validate(specs, found)
        outputs = self.outputs(found)
        self._output_names = tuple(outputs)
        first = len(self.names)
        return found.extended({n: Argument.at_slot(s, first + i) for i, (n, s) in enumerate(outputs.items())})

    def given(self, args: tuple[Any, ...], outs: tuple[Any, ...] = ()) -> Any:
        """The call of these arguments, and of outputs of theirs, with their data."""
        return self.call_type(dict(zip(self.names, args)) | dict(zip(self.output_names if outs else (), outs)))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs; known from the first call on."""
        assert self._output_names is not None, f"{self.name} has not been called"
        return self._output_names

    def output_specs(self, call: Call) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(*getattr(call, name)) for name in self.output_names)

    def specs_in(self, call: Call) -> tuple[Any, ...]:
        """What `call` was made of."""
        return tuple(getattr(call, name) for name in self.signature.decisive)

    def device(self, call: Call) -> torch.device:
        return next(s.device for s in self.specs_in(call) if isinstance(s, TensorSpec))

    def validate(self, specs: tuple[Any, ...], call: Call) -> None:
        """What every op asks of its tensors, then what this op asks."""
        tensors = [(n, s) for n, s in zip(self.signature.decisive, specs) if isinstance(s, TensorSpec)]
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
            self.check(call)
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
        names = self.names[scalars]
        accepted: tuple[Any, ...] | None = None  # the latest: most calls pass the same again

        def checks(args: tuple[Any, ...]) -> None:
            nonlocal accepted
            given = args[scalars]
            try:
                if check is not None and given != accepted:
                    check(**dict(zip(names, given)))
                    accepted = given
                if indices is not None:
                    require_no_capture()
                    indices(self.given(args))
            except BadInput as error:
                raise BadInput(f"{self.name}: {error}") from None

        return checks

    # Errors that are allowed

    def tolerance(self, call: Call) -> dict[torch.dtype, float]:
        return self.allowed(call) if callable(self.allowed) else self.allowed

    def slack(self, call: Call) -> dict[torch.dtype, float]:
        """Error allowed for an element beyond its final rounding, relative to |element| + rms(row)."""
        allowed = self.tolerance(call)
        wide = allowed.get(torch.float32, _FP32_ERROR)
        if self.rounds_between:
            given = [allowed[s.dtype] for s in self.specs_in(call) if isinstance(s, TensorSpec) and s.dtype in allowed]
            return {dtype: _OUTLIER * max(given, default=most) for dtype, most in allowed.items()}
        return {dtype: _OUTLIER * min(most, wide) for dtype, most in allowed.items()}

    # Kernels

    def asked(self, call: Call) -> tuple[str, ...]:
        """The kernels in the order of preference for this problem."""
        first = self.first(call)
        return tuple(self.kernels) if first is None else (first, *(name for name in self.kernels if name != first))

    def kernel(self, name: str) -> Kernel:
        """The kernel, imported on first use."""
        return policy.load_kernel(self, name)

    def add_kernel(self, name: str, where: str) -> None:
        """Hangs a third party's kernel, "package.module:name", below this op, after the ones that are there."""
        require(
            name not in self.kernels, f"{self.name}: there is a kernel {name!r} already, in {self.kernels.get(name)}"
        )
        module, _, attribute = where.partition(":")
        whole = "." in module and attribute  # without a dot it would be looked for beside the contract
        require(bool(whole), f"{self.name}: the kernel {name!r} must be given as package.module:object, got {where!r}")
        self.kernels[name] = where
        self.plans.clear()

    @property
    def folder(self) -> Path:
        """Where the contract lies, and beside it the kernels and the tuned configs that are shipped."""
        return Path(inspect.getfile(self.reference)).parent

    def __repr__(self) -> str:
        return f"<tilery op {self.name}{self.signature.python}>"

    def __reduce__(self) -> Any:
        """A copy or a pickle of an op is the op: a module that holds one can be copied."""
        return _imported, (self.reference.__module__, self.name)


def _imported(module: str, name: str) -> Op:
    importlib.import_module(module)
    return REGISTRY[name]


def op(**contract: Any) -> Callable[[Callable[..., Any]], Op]:
    return lambda reference: Op(reference, **contract)
