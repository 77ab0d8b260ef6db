"""A small transformer that trains on Tilery's ops alone, forward and backward,
beside the same model on torch's.

pip install 'tilery[numba,plot]' && python examples/train_small.py

Both start from the same weights and see the same batches, so their losses
should be the same but for rounding. The text is this file: the model learns to
write it. Parameters, their casts to bf16 and AdamW are torch's in both. Losses
go to train_small.csv and train_small.svg.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

try:
    import matplotlib.figure
    import torch
    import torch.nn.functional as F

    import tilery
except ModuleNotFoundError as missing:
    if missing.name not in ("matplotlib", "torch", "tilery"):
        raise
    sys.exit(f"{missing.name} is not installed: pip install 'tilery[numba,plot]'")

VOCABULARY, CONTEXT, BATCH = 128, 64, 8  # characters, characters a sequence, sequences
WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS = 128, 4, 2, 32, 256, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The most that a loss may differ from torch's, relatively. On a CPU it was 1e-6 in fp32 (200 steps), 5e-4 in bf16 (60).
CLOSE = {"fp32": 1e-4, "bf16": 0.02}


class Tilery:
    """What the model is made of. Where arguments are left out they are the op's defaults."""

    def embedding(self, ids, table):
        return tilery.embedding(ids, table)

    def norm(self, x, weight):
        return tilery.rms_norm(x, weight)

    def linear(self, x, weight, residual=None):
        return tilery.linear(x, weight, residual=residual)

    def rope(self, q, k, cos, sin):
        return tilery.rope(q, k, cos, sin)

    def attention(self, q, k, v):
        return tilery.attention(q, k, v, causal=True)

    def swiglu(self, x, gate_up):
        return tilery.linear_silu_mul(x, gate_up)

    def loss(self, x, weight, targets):
        losses, _ = tilery.fused_linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
        return losses.mean()


class Torch:
    """The same in torch."""

    def embedding(self, ids, table):
        return F.embedding(ids, table)

    def norm(self, x, weight):
        return F.rms_norm(x, weight.shape, weight, eps=1e-6)

    def linear(self, x, weight, residual=None):
        y = F.linear(x, weight)
        return y if residual is None else y + residual

    def rope(self, q, k, cos, sin):
        cos, sin = cos[:, None], sin[:, None]
        turned = []
        for x in (q, k):
            a, b = x.float().chunk(2, -1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype))
        return turned

    def attention(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def swiglu(self, x, gate_up):
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def loss(self, x, weight, targets):
        return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten())


def parameters(device):
    """By name: matrices [outputs, inputs] as linear takes them, weights of norms all 1."""
    shapes = {"table": (VOCABULARY, WIDTH), "norm": (WIDTH,), "head": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes |= {
            f"{i}.norm": (WIDTH,),
            f"{i}.qkv": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
            f"{i}.out": (WIDTH, HEADS * HEAD),
            f"{i}.mlp_norm": (WIDTH,),
            f"{i}.gate_up": (2 * HIDDEN, WIDTH),
            f"{i}.down": (WIDTH, HIDDEN),
        }
    g = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=g) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    ones = {name: torch.ones(shape) for name, shape in shapes.items() if len(shape) == 1}
    return {name: value.to(device).requires_grad_() for name, value in (drawn | ones).items()}


def loss_of(ops, p, ids, targets, cos, sin):
    """Mean loss of predicting each character from those before it."""
    x = ops.embedding(ids, p["table"])
    for i in range(LAYERS):
        heads = ops.linear(ops.norm(x, p[f"{i}.norm"]), p[f"{i}.qkv"]).unflatten(-1, (-1, HEAD))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)  # [batch, context, heads, head]
        q, k = ops.rope(q, k, cos, sin)
        x = ops.linear(ops.attention(q, k, v).flatten(2), p[f"{i}.out"], x)
        inner = ops.swiglu(ops.norm(x, p[f"{i}.mlp_norm"]), p[f"{i}.gate_up"])
        x = ops.linear(inner, p[f"{i}.down"], x)
    return ops.loss(ops.norm(x, p["norm"]), p["head"], targets)


def train(ops, steps, device, dtype):
    """The loss of every step."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    angles = torch.arange(CONTEXT)[:, None] * 10000 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    weights, g, losses = parameters(device), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.01)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=g)
        ids = text[starts + torch.arange(CONTEXT + 1)].to(device)
        used = {name: value.to(dtype) for name, value in weights.items()}
        loss = loss_of(ops, used, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), cos, sin)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def write(folder, found, title):
    """train_small.csv and train_small.svg: a column and a curve for each."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train_small.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["step", *found])
        lines.writerows([step, *losses] for step, losses in enumerate(zip(*found.values()), 1))
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(found.items(), ({"linewidth": 4, "alpha": 0.35}, {"linewidth": 1.2})):
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(title=title, xlabel="step", ylabel="loss (nats a character)", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(folder / "train_small.svg")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training, each of 8 sequences; 200 if not given")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="what products multiply; fp32 if not given")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cuda or cpu; a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder of the two files")
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error(f"--steps must be 1 or more, got {asked.steps}")
    print(f"{asked.steps} steps in {asked.dtype} on {asked.device}; Tilery's first one compiles its kernels")

    found = {}
    for name, ops in (("torch", Torch()), ("Tilery", Tilery())):
        start = time.perf_counter()
        found[name] = train(ops, asked.steps, asked.device, DTYPES[asked.dtype])
        first, last, seconds = found[name][0], found[name][-1], time.perf_counter() - start
        print(f"{name:<7} loss {first:.4f} at step 1, {last:.4f} at step {asked.steps} ({seconds:.0f} s)")
    write(asked.out, found, f"A transformer of {LAYERS} layers in {asked.dtype}, {asked.device}")

    theirs, ours = (torch.tensor(losses) for losses in found.values())
    apart = ((ours - theirs).abs() / theirs).max().item()  # NaN if one is
    right = apart <= CLOSE[asked.dtype]
    print(f"The greatest difference of a loss is {apart:.2g} of torch's: {'right' if right else 'WRONG'}.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
