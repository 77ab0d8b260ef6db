"""What attention_backward is checked and timed with: gradients of outputs, and what the forward made."""

from typing import Any

import torch
from torch import Tensor

from tilery.core import inputs as random
from tilery.parts.attention import attend
from tilery.parts.attention_cases import plant


def draw(
    m: int, keys: int = -1, heads: int = 4, kv_heads: int = 2, n: int = 64, value: int = 0, dtype: str = "bf16",
    batch: int = 1, causal: bool = True, order: str = "bshd", lengths: str = "", dlse: bool = True,
    scale: float | None = None, wrong: str = "",
    layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries and `keys` keys (-1: as many) a sequence, heads of n and values of `value` (0: n).

    `order` is the op's layout. `lengths` are those of packed sequences, "3+5": of keys too, or "3:4+5:0".
    Where `layout` is not contiguous, heads of q, k and v lie so; `special` stands in dout, `wrong` entries
    (attention_cases.plant) in cu_seqlens.
    """
    g = random.generator(seed, device)
    keys, value = (m if keys < 0 else keys), value or n
    parts = [tuple(map(int, (part + ":" + part).split(":")[:2])) for part in lengths.split("+")] if lengths else []
    sizes = parts or [(m, keys)] * batch
    padding = 3 if parts else 0  # tokens of no sequence
    tokens, of_keys = (sum(pair[i] for pair in sizes) + padding for i in range(2))

    def drawn(count: int, rows: int, width: int, special: str = "none") -> Tensor:
        return random.matrix(rows, count * width, dtype, g, layout, special).unflatten(-1, (count, width))

    q, k, v = drawn(heads, tokens, n), drawn(kv_heads, of_keys, n), drawn(kv_heads, of_keys, value)
    dout = drawn(heads, tokens, value, special)
    out, lse = _forward(q, k, v, sizes, n**-0.5 if scale is None else scale, causal)
    given = random.away_from_zero((heads, tokens), g) if dlse else None
    most = [max((pair[i] for pair in parts), default=0) for i in range(2)]
    made = {"dout": dout, "dlse": given, "q": q, "k": k, "v": v, "result": out, "lse": lse}
    if not parts:
        made = {name: _placed(name, x, batch, order) for name, x in made.items()}
    ends = [_ends([pair[i] for pair in parts], device) if parts else None for i in range(2)]
    plant(wrong, q=ends[0], k=ends[1])
    return made | {
        "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "scale": scale, "causal": causal, "layout": order,
        "max_seqlen_q": most[0], "max_seqlen_k": most[1],
    }  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, sizes: list[Any], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    first = first_key = 0
    for queries, keys in sizes:
        rows, columns = slice(first, first + queries), slice(first_key, first_key + keys)
        each = q[rows].float(), k[columns].float(), v[columns].float()
        found, lse[:, rows] = attend(*each, scale, causal=causal)
        out[rows] = found.to(q.dtype)
        first, first_key = first + queries, first_key + keys
    return out, lse


def _placed(name: str, x: Tensor | None, batch: int, order: str) -> Tensor | None:
    """Packed tokens as those of `batch` sequences of one length."""
    if x is None:
        return None
    dim = 1 if name in ("lse", "dlse") else 0
    x = x.unflatten(dim, (batch, x.shape[dim] // batch))
    if dim:
        return x.transpose(0, 1).contiguous()
    return x.transpose(1, 2) if order == "bhsd" else x


def _ends(lengths: list[int], device: Any) -> Tensor:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)
