"""Trains a small Hugging Face model twice from the same weights, in torch and patched by Tilery, and plots both.

pip install 'tilery[numba,hf,plot]' && python examples/finetune.py

The model is a Llama of two layers with random weights, or with --model that of a folder. The text is this file, a token
for each byte. Losses should be the same but for rounding. Losses, and the memory that a step keeps for its backward, go
to finetune.csv and finetune.svg. A GPU is taken where there is one, and its peak memory is printed too.
"""

import argparse
import copy
import csv
import sys
import time
from pathlib import Path

try:
    import matplotlib.figure
    import torch
    import transformers

    import tilery
except ModuleNotFoundError as missing:
    if missing.name not in ("matplotlib", "torch", "transformers", "tilery"):
        raise
    sys.exit(f"{missing.name} is not installed: pip install 'tilery[numba,hf,plot]'")

CONTEXT, BATCH, MIB = 64, 8, 2**20
SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
PIECES = ("norms", "rope", "mlp", "qkv", "attention", "loss")
CLOSE = {"fp32": 1e-4, "bf16": 0.05}  # the most that a loss may differ from torch's, relatively
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(folder, dtype, device):
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


class Kept:
    """Bytes that a forward keeps for its backward, besides the parameters."""

    def __init__(self, model):
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}

    def __call__(self, x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage  # held, so that no other takes its place
        return x

    @property
    def mib(self):
        return sum(storage.nbytes() for storage in self.storages.values()) / MIB


def train(model, steps):
    """The loss of every step, and the MiB that the first one kept for its backward."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    g, losses, device = torch.Generator().manual_seed(1), [], model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model.train()
    kept = Kept(model)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=g)
        ids = text[starts + torch.arange(CONTEXT)].to(device)
        if step:
            loss = model(ids, labels=ids, use_cache=False).loss
        else:
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
                loss = model(ids, labels=ids, use_cache=False).loss
            mib = kept.mib
            kept.storages.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, mib


def write(folder, losses, mib, title):
    """finetune.csv and finetune.svg: a column and a curve for each, and a bar for its memory."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "finetune.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["step", *losses, *(f"{name} MiB" for name in mib)])
        lines.writerows([step, *row, *mib.values()] for step, row in enumerate(zip(*losses.values()), 1))
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    for (name, found), style in zip(losses.items(), ({"linewidth": 4, "alpha": 0.35}, {"linewidth": 1.2})):
        curves.plot(range(1, len(found) + 1), found, label=name, **style)
    curves.set(title=title, xlabel="step", ylabel="loss (nats a token)", ylim=(0, None))
    curves.legend(frameon=False)
    bars.bar(list(mib), list(mib.values()), width=0.6)
    bars.set(title="kept for the backward", ylabel="MiB")
    figure.savefig(folder / "finetune.svg")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with safetensors; its vocabulary must have 256 tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder of the two files")
    asked = parser.parse_args()

    first = load(asked.model, DTYPES[asked.dtype], asked.device)
    losses, mib = {}, {}
    for name in ("torch", "Tilery"):
        model = copy.deepcopy(first)
        if name == "Tilery":
            print(tilery.patch(model, ops=PIECES, strict=True))
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses[name], mib[name] = train(model, asked.steps)
        seconds, found = time.perf_counter() - start, losses[name]
        peak = f", {torch.cuda.max_memory_allocated() / MIB:.0f} MiB at most" if model.device.type == "cuda" else ""
        print(
            f"{name:<7} loss {found[0]:.4f} at step 1, {found[-1]:.4f} at step {asked.steps}; {mib[name]:.1f} MiB kept "
            f"for a backward{peak} ({seconds:.0f} s)"
        )
    kind = type(first).__name__
    write(asked.out, losses, mib, f"{kind} of {first.config.num_hidden_layers} layers in {asked.dtype}, {asked.device}")

    theirs, ours = (torch.tensor(found) for found in losses.values())
    apart = ((ours - theirs).abs() / theirs).max().item()  # NaN if one is
    right = apart <= CLOSE[asked.dtype]
    print(f"The greatest difference of a loss is {apart:.2g} of torch's: {'right' if right else 'WRONG'}.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
