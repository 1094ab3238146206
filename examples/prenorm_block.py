"""A small transformer that adds its residuals inside the norms, trained for a few steps.

Each norm adds what the layer before it returned to the residual stream, normalises the sum, and
returns both: one kernel where torch needs two, and one pass over memory less. The stream is
float32, as in a model whose layers run in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quack_norm import RMSNorm, rmsnorm

EPS = 1e-6


class Block(nn.Module):
    """Attention with normalised queries and keys, then a gated MLP.

    Args:
        dim: width of the stream.
        heads: attention heads; they divide `dim`.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = RMSNorm(dim, eps=EPS)
        self.mlp_norm = RMSNorm(dim, eps=EPS)
        self.q_weight = nn.Parameter(torch.ones(heads, dim // heads))
        self.k_weight = nn.Parameter(torch.ones(heads, dim // heads))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 8 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What to add to the stream next, and the stream; both ``(batch, length, dim)``."""
        x, stream = self.attention_norm(x, residual=stream, prenorm=True)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        # Read where they lie in qkv, with a weight for each head.
        q, k = rmsnorm(q, self.q_weight, eps=EPS), rmsnorm(k, self.k_weight, eps=EPS)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.project(x.transpose(1, 2).flatten(-2))
        x, stream = self.mlp_norm(x, residual=stream, prenorm=True)
        up, gate = self.up(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate)), stream


class Model(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, vocabulary: int, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = RMSNorm(dim, eps=EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, vocabulary)`` of tokens ``(batch, length)``."""
        stream = self.embed(tokens)
        x = torch.zeros_like(stream)
        for block in self.blocks:
            x, stream = block(x, stream)
        x, _ = self.norm(x, residual=stream, prenorm=True)
        return F.linear(x, self.embed.weight)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of each token after those before it."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Learn to count."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(vocabulary=64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        first = torch.randint(64, (16, 1), device=device)
        tokens = (first + torch.arange(33, device=device)) % 64
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
