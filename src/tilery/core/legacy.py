"""TEMPORARY: contracts and kernel modules of the old idiom, seen as the new one. Gone when every family is moved."""

import functools
import importlib
import inspect

from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel

_PLAIN = {}


def contract(reference, given):
    runtime = given.get("runtime", ())
    names = tuple(inspect.signature(reference).parameters)
    decisive = [n for n in names if n not in runtime]

    def of_specs(f):
        return lambda call: f(*[_plain(getattr(call, n)) for n in decisive])

    def of_args(f):
        return lambda call: f(*[getattr(call, n) for n in names])

    made = dict(given)
    for key in ("check", "cost", "bucket", "first", "allowed"):
        if key in given and callable(given[key]):
            made[key] = of_specs(given[key])
    outputs = given["outputs"]
    made["outputs"] = lambda call: {f"out{i}": s for i, s in enumerate(of_specs(outputs)(call))}
    for key in ("indices", "backward_refusal"):
        if given.get(key):
            made[key] = of_args(given[key])
    if given.get("check_runtime"):
        check = given["check_runtime"]
        made["check_runtime"] = lambda **kw: check(*kw.values())
    if given.get("backward"):
        old = given["backward"]

        def backward(call, grads):
            outs = tuple(v for n, v in call._values.items() if n not in names)
            found = old(tuple(getattr(call, n) for n in names), outs, tuple(grads._values.values()))
            found = found if isinstance(found, tuple | list) else (found,)
            return dict(zip(names, found))

        made["backward"] = backward
    package = reference.__module__
    made["kernels"] = {n: f"legacy:{package}.{n.replace('.', '_')}_kernel" for n in given["kernels"]}
    return made


def _plain(value):
    return TensorSpec(*value) if isinstance(value, TensorSpec) else value


class Legacy(Kernel):
    def __init__(self, op, module):
        self.op, self.module = op, module
        self.archs, self.Config = module.archs, module.Config

    def specs(self, call):
        return tuple(_plain(s) for s in self.op.specs_in(call))

    def refusal(self, call, config=None):
        return self.module.refusal(*self.specs(call), config=config)

    def default(self, call):
        return self.module.default(*self.specs(call))

    def configs(self, call):
        return self.module.configs(*self.specs(call))

    def workspace(self, call, config):
        if not hasattr(self.module, "workspace"):
            return {}
        return {f"work{i}": s for i, s in enumerate(self.module.workspace(*self.specs(call), config=config))}

    def estimate(self, call, config):
        return self.module.estimate(*self.specs(call), config=config) if hasattr(self.module, "estimate") else None

    def launches(self, call, config):
        return [Run(self, config, len(self.op.names), len(self.op.output_names))]

    def compile(self, call, config, arch):
        return self.module.compile(self.specs(call), config, arch)


class Run:
    def __init__(self, kernel, config, args, outs):
        self.kernel, self.config, self.args, self.outs = kernel, config, args, outs

    def run(self, values):
        outs = values[self.args : self.args + self.outs]
        self.kernel.module.run(outs, values[: self.args], self.config, *values[self.args + self.outs :])


@functools.cache
def kernel(op, module):
    return Legacy(op, importlib.import_module(module))
