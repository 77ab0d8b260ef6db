"""Policy: which kernel and config a problem gets, who refuses and why, and what a compiler is given."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import plant
import tilery
from tilery import languages
from tilery.base import settings
from tilery.base.errors import BadInput, CompileFailed, NoBackend
from tilery.base.launch import Launch, fill
from tilery.base.spec import Artifact, Bucket, TensorSpec
from tilery.core import policy
from tilery.core.kernel import Kernel
from tilery.hardware import device
from tilery.ops import cross_entropy, matmul, rms_norm, softmax

X, W = torch.randn(4, 8), torch.randn(8)
A, B = torch.randn(4, 8), torch.randn(8, 6)
CALL = softmax.call(softmax.specs((X,)))


# Who runs


def test_kernels_come_in_order_of_preference_and_refusals_are_kept():
    specs = rms_norm.specs((X, W, 1e-6, 0.0))
    plan = rms_norm.plan(specs)
    assert (plan.kernel, plan.source, plan.refusals) == ("numba", "default", {})  # nobody else was asked
    with settings.override(explain=True, emulate=False):
        plan = rms_norm.plan(specs)
    assert plan.kernel == "numba" and plan.refusals["cupy"] == "needs a CUDA tensor, got one on cpu"
    assert plan.refusals["cuda"] == "needs a CUDA tensor, or for a CPU one the emulator: set TILERY_EMULATE=1"


@pytest.mark.parametrize(
    ("op", "m", "n", "arch", "first"),
    [(softmax, 512, 65536, "sm_90", "cuda"), (softmax, 512, 32768, "sm_90", "numba"),
     (softmax, 4, 65536, "sm_80", "numba"), (softmax, 4, 65537, "sm_90", "numba"),
     (rms_norm, 16, 65536, "sm_90", "cuda"), (rms_norm, 512, 65536, "sm_90", "numba"),
     (rms_norm, 512, 131072, "sm_90", "cuda"), (rms_norm, 16, 65536, "cpu", "numba"),
     (cross_entropy, 16, 1024, "sm_80", "triton"), (cross_entropy, 8192, 1024, "sm_90", "cuda")],
)  # fmt: skip
def test_a_problem_may_be_for_another_kernel_first(op, m, n, arch, first):
    where = "cpu" if arch == "cpu" else "cuda:0"
    x, w = (TensorSpec.contiguous(shape, torch.bfloat16, where) for shape in ((m, n), (n,)))
    targets = TensorSpec.contiguous((m,), torch.int64, where)
    specs = {softmax: (x,), rms_norm: (x, w), cross_entropy: (x, targets)}[op]
    with device.pretend(arch):
        asked = op.asked(op.call(specs))
    assert asked[0] == first and sorted(asked) == sorted(op.kernels)


def test_a_backend_that_is_named_and_refuses_is_not_run(monkeypatch):
    plant.refusing(monkeypatch, softmax, "numba", "not on Sundays")
    with pytest.raises(NoBackend, match="numba: not on Sundays"):
        softmax.plan(softmax.specs((X,)), "numba")


def test_the_error_lists_every_refusal_with_the_pip_command(monkeypatch):
    gone, installed = ("numba", "tilelang"), languages.installed
    monkeypatch.setattr(languages, "installed", lambda package: package not in gone and installed(package))
    languages.missing.cache_clear()
    rms_norm.plans.clear()
    try:
        with pytest.raises(NoBackend) as caught:
            rms_norm(X.bfloat16(), W.bfloat16())
    finally:
        languages.missing.cache_clear()
    said = str(caught.value)
    assert all(f"\n  {kernel}: " in said for kernel in rms_norm.kernels)
    assert "numba: numba is not installed: pip install 'tilery[numba]' (no numba)" in said
    assert "tilelang: tilelang is not installed: pip install 'tilery[tilelang]'" in said
    assert "cuda: needs a CUDA tensor, got one on cpu" in said and "bf16[4, 8] with strides [8, 1] on cpu" in said


def test_another_kernels_config_is_refused():
    kernel = matmul.kernel("numba")
    config = next(iter(kernel.configs(matmul.call(matmul.specs((A, B, "ieee"))))))
    assert isinstance(config, kernel.Config)
    with pytest.raises(BadInput, match="rms_norm: config must be numba's Config"):
        rms_norm(X, W, backend="numba", config=config)


def test_buckets_group_what_one_config_may_serve():
    def bucket(m, n, k, trans):
        b = TensorSpec((k, n), (1, k) if trans else (n, 1), torch.bfloat16, torch.device("cuda", 0), True)
        return matmul.bucket(matmul.call((TensorSpec.contiguous((m, k), torch.bfloat16, "cuda:0"), b, "ieee")))

    assert bucket(5, 8, 16, True) == Bucket("n=8,k=16,bf16,nt", {"m": 5})
    assert bucket(5, 8, 16, True).exact == bucket(900, 8, 16, True).exact != bucket(5, 8, 16, False).exact


def test_explain_says_who_was_chosen_and_who_refused(capsys):
    tilery.explain_dispatch()
    try:
        rms_norm(X, W)
        rms_norm(X, W)
    finally:
        tilery.explain_dispatch(False)
    said = capsys.readouterr().err
    assert said.count("tilery: rms_norm(fp32[4, 8]") == 1  # once per plan
    assert "runs numba with Config(" in said and ", default" in said
    rms_norm(X, W)
    assert capsys.readouterr().err == ""


def test_a_call_imports_no_language_but_its_own():
    code = "import sys, torch, tilery; tilery.softmax(torch.randn(3, 4)); print([m for m in sys.modules if m in {!r}])"
    command = [sys.executable, "-c", code.format(("cupy", "tilelang", "triton", "cuda.tile"))]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "[]"


# Where kernels are


def test_a_kernel_lies_beside_its_contract_or_where_a_dot_says(monkeypatch):
    ours = softmax.kernel("numba")
    assert type(ours).__module__ == "tilery.ops.softmax.numba_kernels"
    theirs = plant.ByTorch(torch.softmax)
    plant.add(monkeypatch, softmax, "numba.theirs", theirs)
    assert softmax.kernel("numba.theirs") is theirs and list(softmax.kernels)[-1] == "numba.theirs"


def test_a_third_partys_kernel_comes_last_and_takes_no_name_twice(monkeypatch):
    monkeypatch.setattr(softmax, "kernels", dict(softmax.kernels))
    softmax(X)
    softmax.add_kernel("numba.theirs", "theirs.kernels:softmax")
    assert list(softmax.kernels)[-1] == "numba.theirs" and not len(softmax.plans)
    with pytest.raises(BadInput, match="there is a kernel 'numba' already, in numba_kernels:softmax"):
        softmax.add_kernel("numba", "theirs.kernels:softmax")
    for where in ("theirs:softmax", "theirs.kernels"):
        with pytest.raises(BadInput, match=f"'numba.more' must be given as package.module:object, got '{where}'"):
            softmax.add_kernel("numba.more", where)


# What kernels are given


class Wide(Kernel):
    """Launches what it is told, in workspace of its own."""

    archs, Config = ("sm_90",), plant.NoChoice

    def __init__(self, *launches):
        self.made = launches

    def workspace(self, call, config):
        return {name: TensorSpec.contiguous((3,), torch.float32, "cpu") for name in ("sums", "counts")}

    def launches(self, call, config):
        return [made(call) for made in self.made]


def test_workspace_comes_after_arguments_and_outputs():
    specs, call = policy.with_workspace(softmax, Wide(), CALL, None)
    assert [spec.shape for spec in specs] == [(3,), (3,)]
    assert [argument.slot for argument in (call.x, call.y, call.sums, call.counts)] == [0, 1, 2, 3]
    with pytest.raises(AttributeError):
        _ = CALL.sums  # the call that it was made of is as it was


@pytest.fixture
def compiled(monkeypatch):
    """What policy makes of launches whose compiler says these registers and spills, by the kernel's name."""
    made = {"light": (10, 0), "heavy": (200, 0), "spilling": (50, 8)}

    def compile(launch, arch):
        return Artifact(arch, {}, registers=made[launch.kernel][0], spills=made[launch.kernel][1])

    monkeypatch.setattr(languages, "load", lambda kernel: SimpleNamespace(compile=compile))

    def artifact(*kernels):
        launches = [lambda call, k=k: Launch(k, 1, {}) if k else fill(call.y, 0.0) for k in kernels]
        plant.add(monkeypatch, softmax, "cuda.wide", Wide(*launches))
        return policy.compiled(softmax, "cuda.wide", CALL, plant.NoChoice(), "sm_90")

    return artifact


def test_of_several_launches_the_compiled_one_is_that_which_takes_most_of_an_sm(compiled):
    assert compiled("light", "heavy", None).registers == 200
    assert compiled("light", "spilling", "heavy").spills == 8
    assert compiled("light").arch == "sm_90"


def test_what_torch_fills_alone_is_not_compiled(compiled):
    with pytest.raises(CompileFailed, match=r"softmax cuda\.wide launches no kernel for this problem"):
        compiled(None)
