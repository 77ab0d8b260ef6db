"""Every op, kernel and case. A kernel that cannot run here is compiled, for architectures that it claims."""

import dataclasses
import functools
import os
import re
import sys
import zlib

import pytest
import torch

import plant
import tilery.ops
from cases import plain_case, size
from compilers import most_spills
from tilery import languages
from tilery.base.errors import Wrong
from tilery.base.spec import TensorSpec, case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.kernel import Kernel
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.hardware.machine_code import unset_registers
from tilery.measure.check import check, conform, poisoned
from tilery.measure.place import place

OPS = tuple(REGISTRY.values())
KERNELS = [pytest.param(op, k, id=f"{op.name}-{k}") for op in OPS for k in op.kernels]
CASES = [pytest.param(op, k, c, id=f"{op.name}-{k}-{c}") for op in OPS for k in op.kernels for c in op.cases["test"]]
VARIANTS = ("per", "format")  # parameters by which a kernel's code differs much
OTHER_LAYOUTS = ("padded", "far", "transposed")  # aligned ones and misaligned ones take different code: two are enough
ALL = os.environ.get("TILERY_TEST_ARCHS") == "all"  # every architecture, and every dtype on each
# Bytes of stack with Triton 3.6: of a 64 × 512 accumulator that takes all registers, and of fp8 values one by one.
SPILLS_WITH_OLDER = {("mla_decode", "triton"): 8, ("transpose", "triton"): 56}

# Their second launch loads, before it waits, what the first does not write; tests of their own look at its order.
LOADS_AHEAD = {("fused_moe", "cuda")}


def language_needed(kernel):
    if why := languages.missing(kernel):
        pytest.skip(why)


@pytest.mark.parametrize(("op", "kernel", "case"), CASES)
def test_kernel_is_right_or_refuses_as_declared(op, kernel, case):
    language_needed(kernel)
    where = place(op, kernel)
    if where.device is not None:
        why = policy.environment_refusal(op, kernel, where.device, call_for(op, case, str(where.device)))
        if why is None:
            conform(op, kernel, case, where.device)
            return
        pytest.skip(f"{why}; compiled by test_builds_for_every_claimed_architecture")
    declared_refusal_holds(op, kernel, case, where.arch)
    pytest.skip("needs a GPU; compiled by test_builds_for_every_claimed_architecture")


def declared_refusal_holds(op, kernel, case, arch):
    """Refusals need no GPU: they see specs."""
    expected = case.refused_by.get(kernel)
    with device.pretend(arch):
        why = policy.problem_refusal(op, kernel, call_for(op, case))
    assert (why is None) == (expected is None), f"declared {expected!r}, said {why!r}"
    assert expected is None or expected in why


def builds():
    """For sm_90 and one other that a kernel claims, not the same for all kernels; TILERY_TEST_ARCHS=all: for all."""
    for op in OPS:
        for kernel in op.kernels:
            if languages.missing(kernel) is None and languages.is_ours(kernel):  # a library is compiled already
                archs = op.kernel(kernel).archs
                others = [arch for arch in archs if arch != "sm_90"]
                if others and not ALL:
                    chosen = others[zlib.crc32(f"{op.name} {kernel}".encode()) % len(others)]
                    archs = [arch for arch in archs if arch in ("sm_90", chosen)]
                for arch in archs:
                    yield pytest.param(op, kernel, arch, id=f"{op.name}-{kernel}-{arch}")


@pytest.mark.parametrize(("op", "kernel", "arch"), list(builds()))
def test_builds_for_every_claimed_architecture(op, kernel, arch, compiler, record_property):
    """In every dtype where most run (sm_90), in one elsewhere; a CPU's kernels run here, in all of them.

    TileLang takes seconds for each: in one dtype too.
    """
    made = compiled_per_dtype(op, kernel, arch, compiler, every=ALL or (arch == "sm_90" and kernel != "tilelang"))
    for dtype, artifact in made.items():
        if arch == "cpu":
            continue  # it runs here: the other tests look at what it does
        assert 0 < artifact.registers <= 255
        # Numba-CUDA's code depends on which NVVM and linker happen to be here; odd addresses may cost registers.
        if arch == "sm_90" and kernel != "numba_cuda" and "misaligned" not in dtype:
            most = most_spills(kernel, SPILLS_WITH_OLDER.get((op.name, kernel), 0))
            assert artifact.spills <= most, "the default spills where it matters most"
        with device.pretend(arch):
            assert 0 <= artifact.shared <= device.gpu(torch.device("cuda", 0)).shared_per_block
        assert waits_first(artifact.code.get("ptx", "")) or (op.name, kernel) in LOADS_AHEAD
        assert not unset_by_compiler(artifact)
        record_property("resources", (f"{op.name} {kernel} {dtype} {arch}", resources(artifact)))
    assert made, f"{op.name} {kernel} takes no case on {arch}"


@pytest.mark.parametrize(("op", "kernel"), [p for p in KERNELS if p.values[1].partition(".")[0] in ("triton", "gluon")])
def test_builds_with_triton_36(op, kernel, compiler_36, record_property):
    for dtype, artifact in compiled_per_dtype(op, kernel, "sm_90", compiler_36, every=ALL).items():
        record_property("resources", (f"{op.name} {kernel} {dtype} sm_90 triton-3.6.0", resources(artifact)))
        assert 0 < artifact.registers <= 255
        assert not unset_by_compiler(artifact)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "kernel"), [p for p in KERNELS if p.values[1].partition(".")[0] in ("triton", "gluon")])
def test_no_config_reads_what_its_compiler_left_unset(op, kernel, compiler_36):
    """Every config of every case that comes to tensor cores, as Triton 3.6 compiles it."""
    for c in op.cases["test"]:
        specs = known_specs(op.name, str(c), "cuda:0")
        with device.pretend("sm_90"):
            call, made = op.call(specs), op.kernel(kernel)
            if 0 in (x for s in op.output_specs(call) for x in s.shape) or policy.problem_refusal(op, kernel, call):
                continue
            configs = dict.fromkeys([made.default(call), *made.configs(call)])
        for config in configs:
            artifact = compiler_36.compile(op.name, kernel, specs, "sm_90", config)
            if "wgmma" not in artifact.code["ptx"]:
                break  # nor do its other configs
            assert not unset_registers(artifact.cubin), (str(c), config)


def unset_by_compiler(artifact):
    """What wgmma multiplies is named by uniform registers, which ptxas 12.8 forgets to set in some kernels."""
    multiplies = artifact.arch == "sm_90" and "wgmma" in artifact.code.get("ptx", "wgmma")
    return unset_registers(artifact.cubin) if multiplies else {}


def waits_first(ptx):
    """A kernel that may start while the one before ends touches no memory before that one has ended."""
    wait, access = ptx.find("griddepcontrol.wait"), re.search(r"\b(ld|st|red|atom|cp)[\w.:]*\.global", ptx)
    return wait < 0 or access is None or wait < access.start()


def compiled_per_dtype(op, kernel, arch, compiler, every):
    made = {}
    for c in largest_first(op):
        what = " ".join(str(c.params[p]) for p in ("dtype", *VARIANTS) if p in c.params)
        what += " misaligned" if c.params.get("layout") == "misaligned" else ""
        if what in made or kernel in c.refused_by or (made and not every) or c.params.get("layout") in OTHER_LAYOUTS:
            continue
        specs = known_specs(op.name, str(c), "cpu" if arch == "cpu" else "cuda:0")
        made[what] = compiler.compile(op.name, kernel, specs, arch)
    return made


@functools.cache
def largest_first(op):
    return sorted([*op.cases["bench"][1:2], *op.cases["test"]], key=lambda c: -size(op, c))


@functools.cache
def known_specs(op, case, where):
    return specs_for(REGISTRY[op], next(c for cs in REGISTRY[op].cases.values() for c in cs if str(c) == case), where)


def resources(artifact):
    return f"{artifact.registers:>4} {artifact.spills:>4} {artifact.shared:>7}"


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_every_config_is_right(op, kernel):
    language_needed(kernel)
    where = place(op, kernel)
    if where.device is None:
        pytest.skip("needs a GPU; the default config is compiled by test_builds_for_every_claimed_architecture")
    small = plain_case(op, ("fp16", "fp32"), kernel)
    call = call_for(op, small, str(where.device))
    configs = op.kernel(kernel).configs(call)
    assert configs and op.kernel(kernel).default(call)
    for config in some(interpreted_apart(configs) if where.interpreted else configs, kernel, where):
        assert check(op, kernel, small, where.device, config=config).refused is None, config


def some(configs, kernel, where):
    """All, but some from among them all where one takes seconds to compile: in TileLang, and for the emulator. A tuner
    checks what it takes."""
    most = {"emulator": 4}.get(where.interpreted, 8 if kernel == "tilelang" else len(configs))
    return configs[:: max(len(configs) // most, 1)]


def interpreted_apart(configs):
    """One of those that differ in stages alone, which the interpreter does not have. (Warps decide constants, too.)"""
    return list({str(dataclasses.asdict(config) | {"num_stages": None}): config for config in configs}.values())


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_ten_runs_give_the_same_bits(op, kernel):
    language_needed(kernel)
    where = place(op, kernel)
    if where.device is None:
        pytest.skip("needs a GPU")
    dtypes = {c.params.get("dtype") for c in op.cases["test"] if kernel not in c.refused_by}
    problem = plain_case(op, "fp32" if "fp32" in dtypes else "fp16", kernel)
    first = bits(op, kernel, problem, where.device)
    for _ in range(1 if where.interpreted else 9):
        assert bits(op, kernel, problem, where.device) == first


def bits(op, kernel, problem, where):
    args = op.complete((), op.inputs(**problem.params, device=where, seed=7))
    plan = op.plan(op.specs(args), kernel)
    outs = tuple(spec.empty() for spec in plan.outs)
    plan.launch(outs, args)
    written = (*outs, *(args[i] for i in plan.mutated))
    return [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in written]


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_a_kernel_has_what_dispatch_asks_for(op, kernel):
    language_needed(kernel)
    found = op.kernel(kernel)
    assert isinstance(found, Kernel) and found.archs and set(found.archs) <= {"cpu", *device.ARCHS}
    assert dataclasses.is_dataclass(found.Config) and found.Config.__dataclass_params__.frozen


def test_every_kernel_is_some_ops():
    """What a family's modules define and no op names is dead code."""
    named = {id(op.kernel(k)) for op in OPS for k in op.kernels if languages.missing(k) is None}
    for name, module in list(sys.modules.items()):
        if name.startswith("tilery.ops."):
            made = {n: v for n, v in vars(module).items() if isinstance(v, Kernel)}
            assert all(id(v) in named for v in made.values()), f"{name}: {sorted(made)}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_builds_everywhere(op):
    """sm_80 to sm_120 and the CPU: some kernel claims each."""
    claimed = {arch for k in op.kernels if languages.missing(k) is None for arch in op.kernel(k).archs}
    assert claimed >= {"cpu", *device.ARCHS} >= {"cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"}


# Planted corruptions: the check that everything rests on can fail, down to a single element.


def nothing(t):
    """Never computed."""
    t.zero_()


def last_element(t):
    """Not written: what is there is the poison."""
    t[tuple(size - 1 for size in t.shape)] = poisoned(TensorSpec.contiguous((), t.dtype, t.device))


def one_element(t):
    """A finite one near the middle is off by a quarter of what is usual."""
    there = (t.double().isfinite() & (t.double() != 0)).nonzero()
    shift(t, tuple(there[len(there) // 2].tolist()))


def one_row(t):
    shift(t, (-1,) if t.dim() > 1 else (slice(None),))


def a_tiles_edge(t):
    """The last column, in all rows: where a mask is one short."""
    shift(t, (..., slice(-1, None)))


def shift(t, where):
    """Add a quarter of the rms there; of integers one, of fp8 two steps towards 1, so that none becomes NaN."""
    if not t.is_floating_point():
        t[where] = t[where] + 1
    elif t.itemsize == 1:
        bits = t.view(torch.uint8)
        bits[where] = bits[where] + torch.where((bits[where] & 0x7F) >= 0x38, -2, 2).to(torch.uint8)
    else:
        wide = t.double()
        t[where] = (wide[where] + wide[wide.isfinite()].square().mean().sqrt() / 4).to(t.dtype)


CORRUPTIONS = (nothing, last_element, one_element, one_row, a_tiles_edge)


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_planted_corruption_is_found(op, corrupt, dtype, monkeypatch):
    """In the first result of a kernel that is right otherwise."""
    problem = plain_case(op, dtype, "numba")
    # A seed of its own: one in fifty would draw an fp8 value close to the poison.
    assert check(op, "numba", problem, "cpu", seed=1).errors
    plant.after(monkeypatch, op, "numba", corrupt)
    with pytest.raises(Wrong, match=r"output 0 (has error|is )"):
        check(op, "numba", problem, "cpu", seed=1)


def test_a_dropped_k_tile_is_found(monkeypatch):
    op = REGISTRY["matmul"]
    plant.instead(monkeypatch, op, "numba", lambda a, b, c: c.copy_(a[:, 16:] @ b[16:]), "a", "b", "c")
    with pytest.raises(Wrong, match="output 0 has error"):
        check(op, "numba", plain_case(op, "bf16", "numba"), "cpu")


def test_refusing_what_it_should_take_fails(monkeypatch):
    op = REGISTRY["rms_norm"]
    monkeypatch.setattr(type(op.kernel("numba")), "refusal", lambda self, call, config=None: "not today")
    with pytest.raises(Wrong, match="should take it, refused: not today"):
        conform(op, "numba", case(m=3, n=8, dtype="fp32"), "cpu")


def test_taking_what_it_should_refuse_fails():
    with pytest.raises(Wrong, match="should refuse with 'odd', said None"):
        conform(REGISTRY["rms_norm"], "numba", case(m=3, n=7, dtype="fp32", refused_by={"numba": "odd"}), "cpu")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_interpreter_refuses_bf16(op, monkeypatch):
    """It would multiply raw bits and say nothing."""
    language_needed("triton")
    monkeypatch.setattr(languages.load("triton"), "_INTERPRETED", True)
    args = op.complete((), op.inputs(**plain_case(op, "bf16", "triton").params, device="cpu"))
    if not any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
        pytest.skip("takes integers alone")
    with pytest.raises(tilery.base.errors.NoBackend, match="raw bits of bf16"):
        op(*args, backend="triton")
