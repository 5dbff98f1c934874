"""Float32 master weights -> the weights as shipped (ternary, 4-bit, BF16) -> logits: Maple in PyTorch.

Does not know the data, the optimizer or files. Training is quantization-aware with a straight-through
estimator: once a step `quantize` makes, from each master tensor, the tensor that the exported file will
hold; the forward and backward pass see only that one, and its gradient is applied to the master. So what is
evaluated is what is shipped.

Arithmetic: the residual stream, norms, router and softmax are float32; matrix products take `dtype` (BF16
to train, float32 to compare). Ternary rows of a BF16 alpha are exact in BF16, so only the 4-bit weights are
rounded once more. In float32 this agrees with llama.cpp's own Maple within 4e-5 on a small random model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CLAMP = 7.0  # silu(min(gate, 7)) * clip(up, -7, 7)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; names as in config.json."""

    hidden_size: int = 256
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    vocab_size: int = 4096
    sliding_window: int = 128
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024

    def is_sliding(self, layer: int) -> bool:
        return layer % 4 != 3

    def layer_types(self) -> list[str]:
        layers = range(self.num_hidden_layers)
        return ["sliding_attention" if self.is_sliding(layer) else "full_attention" for layer in layers]


def init_masters(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Float32 master weights by name; q, k, v and gate, up are stacked along their rows."""
    generator = torch.Generator().manual_seed(seed)
    D, E, F_ = shape.hidden_size, shape.num_experts, shape.moe_intermediate_size
    H, KV, hd, V = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.vocab_size

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    depth = (2 * shape.num_hidden_layers) ** -0.5  # outputs into the residual stream start smaller
    masters = {"word_embeddings": normal(V, D, std=0.5), "lm_head": normal(V, D, std=0.02)}
    masters["norm"] = torch.ones(D)
    for layer in range(shape.num_hidden_layers):
        masters |= {
            f"{layer}.input_layernorm": torch.ones(D),
            f"{layer}.post_attention_layernorm": torch.ones(D),
            f"{layer}.q_norm": torch.ones(hd),
            f"{layer}.k_norm": torch.ones(hd),
            f"{layer}.qkv": normal((H + 2 * KV) * hd, D, std=D**-0.5),
            f"{layer}.o": normal(D, H * hd, std=depth * (H * hd) ** -0.5),
            f"{layer}.router": normal(E, D, std=0.02),
            f"{layer}.gate_up": normal(E, 2 * F_, D, std=D**-0.5),
            f"{layer}.down": normal(E, D, F_, std=depth * F_**-0.5),
        }
    return masters


def is_ternary(name: str) -> bool:
    return name.rpartition(".")[2] in ("qkv", "o", "gate_up", "down")


def is_four_bit(name: str) -> bool:
    return name in ("word_embeddings", "lm_head")


def ternary_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 [..., in] -> codes 0, 1, 2 (uint8 [..., in]) and alpha (BF16 [...]).

    A value is (code - 1) * alpha. Per row: threshold 0.7 * mean|w|, alpha = mean of the survivors' |w|,
    rounded once to BF16.
    """
    magnitude = w.abs()
    kept = magnitude > 0.7 * magnitude.mean(-1, keepdim=True)
    alpha = ((magnitude * kept).sum(-1) / kept.sum(-1).clamp(min=1)).bfloat16()
    return torch.where(kept, torch.where(w > 0, 2, 0), 1).to(torch.uint8), alpha


def affine_codes(w: Tensor, bits: int = 4, group: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of float32 [V, D] -> codes uint8 [V, D], scales and biases BF16 [V, D/group].

    A value is code * scale + bias.
    """
    groups = w.unflatten(-1, (-1, group))  # [V, D/group, group]
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-8).bfloat16()
    biases = low.bfloat16()
    codes = (groups - biases.float()[..., None]) / scales.float()[..., None]
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(-2), scales, biases


def affine_values(codes: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    """The float32 values of 4-bit codes, the inverse of `affine_codes`."""
    groups = codes.float().unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)


def _quantized(name: str, master: Tensor) -> Tensor:
    if is_ternary(
        name
    ):  # as `ternary_codes`, without the codes between: this runs over all weights every step
        magnitude = master.abs()
        kept = magnitude > magnitude.mean(-1, keepdim=True).mul_(0.7)
        alpha = magnitude.mul_(kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
        return (master.sign().mul_(kept) * alpha.bfloat16().float()).bfloat16()
    if is_four_bit(name):
        return affine_values(*affine_codes(master))
    return master.bfloat16().float()  # router and norms


@torch.no_grad()
def quantize(masters: dict[str, Tensor], into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights as shipped, as leaves that collect gradients: ternary BF16, all others float32."""
    if into is None:
        return {name: _quantized(name, w).requires_grad_() for name, w in masters.items()}
    for name, w in masters.items():
        into[name].copy_(_quantized(name, w))
    return into


class _Spread(torch.autograd.Function):
    """Token vectors [N, D] -> one row for each (token, chosen expert), ordered by expert [N*K, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (row_of_choice,) = ctx.saved_tensors  # [N, K]
        rows = grad.index_select(0, row_of_choice.flatten())
        return rows.view(*row_of_choice.shape, -1).sum(1), None, None


class _Gather(torch.autograd.Function):
    """The inverse: rows ordered by expert [N*K, D] -> the sum of each token's rows [N, D]."""

    @staticmethod
    def forward(ctx, rows: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return rows.index_select(0, row_of_choice.flatten()).view(*row_of_choice.shape, -1).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (token_of_row,) = ctx.saved_tensors
        return grad.index_select(0, token_of_row), None, None


class _ClampedSwiGLU(torch.autograd.Function):
    """silu(min(g, 7)) * clip(u, -7, 7) * weight, of [n, 2F] (gate, up) and [n, 1]; recomputed backward."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=CLAMP)).mul_(up.clamp(-CLAMP, CLAMP)).mul_(weight.to(gate_up.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        clamped, clipped = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        silu = F.silu(clamped)
        through_silu = grad * silu
        grad_weight = (through_silu * clipped).sum(-1, keepdim=True, dtype=torch.float32)
        weight = weight.to(grad.dtype)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(through_silu, weight, out=through_silu)
        aten.hardtanh_backward.grad_input(through_silu, up, -CLAMP, CLAMP, grad_input=grad_up)
        through_up = aten.silu_backward((grad * weight).mul_(clipped), clamped)
        aten.hardtanh_backward.grad_input(through_up, gate, float("-inf"), CLAMP, grad_input=grad_gate)
        return grad_gate_up, grad_weight


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of [B, T, heads, head_dim]; cos [T, 1, R/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _attention(weights: dict, layer: int, shape: Shape, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention over [B, T, D]; on sliding layers T is a multiple of the window or shorter than it.

    Plain products: with a mask, and on the CPU, PyTorch's fused attention takes twice as long.
    """
    B, T, _ = x.shape
    H, KV, hd = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    G, sliding = H // KV, shape.is_sliding(layer)
    qkv = F.linear(x, weights[f"{layer}.qkv"].to(dtype)).view(B, T, H + 2 * KV, hd)
    scale = (weights[f"{layer}.q_norm"] * hd**-0.5).expand(H, hd)  # with the scale of the scores
    scale = torch.cat([scale, weights[f"{layer}.k_norm"].expand(KV, hd)])
    qk = F.rms_norm(qkv[:, :, : H + KV].float(), (hd,), eps=shape.rms_norm_eps) * scale  # [B, T, H + KV, hd]
    if sliding:
        R = int(hd * shape.partial_rotary_factor)
        frequency = shape.rope_theta ** (-torch.arange(0, R, 2, dtype=torch.float32) / R)  # [R/2]
        angle = (torch.arange(T, dtype=torch.float32)[:, None] * frequency)[:, None]  # [T, 1, R/2]
        qk = _rotate(qk, angle.cos(), angle.sin())
    q, k = qk.to(dtype).split((H, KV), 2)

    # n blocks of W queries; with a window, each against its own block and the one before it.
    W = shape.sliding_window if sliding and shape.sliding_window < T else T
    assert T % W == 0, f"{T} tokens are not whole windows of {W}"
    n = T // W
    q = q.reshape(B, n, W, KV, G, hd).permute(0, 3, 1, 4, 2, 5).reshape(B, KV, n, G * W, hd)
    k = k.transpose(1, 2).unflatten(2, (n, W))  # [B, KV, n, W, hd]
    v = qkv[:, :, H + KV :].transpose(1, 2).unflatten(2, (n, W))
    at = torch.arange(W)
    seen = (at[:, None] >= at).expand(n, W, W)  # block, query, key
    if n > 1:
        k, v = _with_previous(k), _with_previous(v)  # [B, KV, n, 2W, hd]
        before = (at > at[:, None]).repeat(n, 1, 1)
        before[0] = False
        seen = torch.cat([before, seen], 2)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf")).repeat(1, G, 1)
    out = (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v  # [B, KV, n, G * W, hd]
    out = out.view(B, KV, n, G, W, hd).permute(0, 2, 4, 1, 3, 5).reshape(B, T, H * hd)
    return F.linear(out, weights[f"{layer}.o"].to(dtype))


def _with_previous(blocks: Tensor) -> Tensor:
    """[B, KV, n, W, hd] -> [B, KV, n, 2W, hd]: each block after the one before it (at first, zeros)."""
    return torch.cat([F.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0)), blocks], 3)


def _rows_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out the choices [N, K] as P rows ordered by expert.

    Each expert's rows are padded to a multiple of 32: oneDNN compiles a kernel for every new number of
    rows, which at exact counts doubles a step's time. Returns the row of each choice [N, K], the token of
    each row [P] (0 for padding), the choices of each expert [E] and where each expert's rows end, int32
    [E].
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)  # [N*K]
    counts = flat.bincount(minlength=num_experts)
    ends = ((counts + 31) // 32 * 32).cumsum(0)
    padding = (ends - counts.cumsum(0)).roll(1)  # of the experts before each one
    padding[0] = 0
    rows = torch.arange(len(flat)) + padding[flat[order]]
    row_of_choice = torch.empty_like(rows).scatter_(0, order, rows).view(experts.shape)
    token_of_row = torch.zeros(int(ends[-1]), dtype=torch.long).scatter_(0, rows, order // experts.shape[1])
    return row_of_choice, token_of_row, counts, ends.int()


def _moe(
    weights: dict, layer: int, shape: Shape, x: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts over float32 [N, D]: output [N, D], the balance loss (1 when even), choices per expert [E]."""
    E, K = shape.num_experts, shape.num_experts_per_tok
    probabilities = F.linear(x, weights[f"{layer}.router"]).softmax(-1)  # [N, E] float32
    chosen, experts = probabilities.topk(K, -1)  # [N, K]
    shares = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    row_of_choice, token_of_row, counts, ends = _rows_by_expert(experts, E)
    rows = _Spread.apply(x.to(dtype), token_of_row, row_of_choice)  # [P, D]
    gate_up = F.grouped_mm(rows, weights[f"{layer}.gate_up"].to(dtype).transpose(1, 2), offs=ends)  # [P, 2F]
    row_shares = torch.zeros(len(rows)).scatter(0, row_of_choice.flatten(), shares.flatten())  # 0 for padding
    hidden = _ClampedSwiGLU.apply(gate_up, row_shares[:, None])  # [P, F]
    rows = F.grouped_mm(hidden, weights[f"{layer}.down"].to(dtype).transpose(1, 2), offs=ends)  # [P, D]
    balance = E * (probabilities.mean(0) * (counts / counts.sum())).sum()
    return _Gather.apply(rows, token_of_row, row_of_choice), balance, counts


def forward(
    weights: dict[str, Tensor], shape: Shape, ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, T] -> final hidden states [B, T, D], balance loss, choices per expert [layers, E]."""
    eps = shape.rms_norm_eps
    B, T = ids.shape
    h = F.embedding(ids, weights["word_embeddings"])  # [B, T, D] float32
    balances, counts = [], []
    for layer in range(shape.num_hidden_layers):
        x = _rms_norm(h, weights[f"{layer}.input_layernorm"], eps)
        h = h + _attention(weights, layer, shape, x.to(dtype), dtype)
        x = _rms_norm(h, weights[f"{layer}.post_attention_layernorm"], eps)
        out, balance, count = _moe(weights, layer, shape, x.view(B * T, -1), dtype)
        h = h + out.view(B, T, -1)
        balances.append(balance)
        counts.append(count)
    return _rms_norm(h, weights["norm"], eps), torch.stack(balances).mean(), torch.stack(counts)


def logits_of(weights: dict[str, Tensor], hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states [..., D] -> float32 logits [..., V]."""
    return F.linear(hidden.to(dtype), weights["lm_head"].to(dtype)).float()


class _CrossEntropy(torch.autograd.Function):
    """Mean loss of hidden [n, D] under head [V, D]; gradients come with the loss, in chunks of logits."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        n = len(labels)
        loss = 0.0
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        for x, y, grad in zip(*(t.split(512) for t in (hidden, labels, grad_hidden)), strict=True):
            logits = F.linear(x, head).float()  # [512, V]
            log_p = logits.log_softmax(-1)
            loss -= float(log_p.gather(1, y[:, None]).double().sum())
            slope = log_p.exp_()
            slope.scatter_add_(1, y[:, None], torch.full((len(y), 1), -1.0))
            slope = slope.mul_(1 / n).to(head.dtype)
            torch.mm(slope, head, out=grad)
            grad_head += slope.T @ x
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        return torch.tensor(loss / n)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None


def cross_entropy(weights: dict[str, Tensor], hidden: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean loss in nats over the labels that are trained (-100 are not); the head runs only on those."""
    labels = labels.flatten()
    trained = (labels != -100).nonzero().flatten()
    hidden = hidden.flatten(0, 1).index_select(0, trained).to(dtype)
    return _CrossEntropy.apply(hidden, weights["lm_head"].to(dtype), labels[trained])
