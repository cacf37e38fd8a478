"""Small causal language models of characters, and the text that they learn: the sources of Python's standard library,
which every installation has. `train_language.py` trains them, and nothing of theirs is stored in this project.

Every tenth file is kept for the test.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Characters of a sample.
CONTEXT: Final = 128
#: What a model reads: characters of ASCII that are printed, a new line, and one for all others.
ALPHABET: Final = "\n" + "".join(map(chr, range(32, 127))) + "\0"
#: Every so many files of the library are for the test.
TESTED: Final = 10
#: Folders of the standard library that are left out: tests, and what else is no text of the library.
LEFT_OUT: Final = ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo")


def read_text(tested: bool, folder: Path | None = None) -> Tensor:
    """The numbers of all characters of the files that are tested, or of the others; int64 (characters,).

    Args:
        folder: of the standard library.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = sorted(f for f in root.rglob("*.py") if not set(f.relative_to(root).parts) & {*LEFT_OUT})
    chosen = [f for i, f in enumerate(files) if (i % TESTED == 0) == tested]
    text = "".join(f.read_text("utf-8", errors="replace").replace("\t", "    ") for f in chosen)
    numbers = torch.full((128,), len(ALPHABET) - 1)
    numbers[torch.tensor([ord(c) for c in ALPHABET])] = torch.arange(len(ALPHABET))
    codes = torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
    return numbers[codes.to(torch.int64)]


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """Windows of CONTEXT + 1 characters at random places, int64 (count, CONTEXT + 1)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]


def negative_log_likelihood(logits: Tensor, samples: Tensor) -> Tensor:
    """Of every sample the mean over its characters, in nats: (samples,). Its exponential is the perplexity."""
    losses = F.cross_entropy(logits.double().flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
    return losses.view(len(samples), -1).mean(1)


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it and a sum after it.

    Args:
        gated: whether it is built as in LLaMA (RMSNorm, SwiGLU, rotary positions, no biases) instead of as in GPT-2
            (layer norm, GELU).
    """

    def __init__(self, width: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.first, self.second = norm(width, 1e-5), norm(width, 1e-5)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, not gated) for _ in range(4))
        hidden = width * 8 // 3 // 32 * 32 if gated else 4 * width
        self.up, self.down = nn.Linear(width, hidden, not gated), nn.Linear(hidden, width, not gated)
        if gated:
            self.gate = nn.Linear(width, hidden, False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width) to the same shape."""
        y = self.first(x)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query(y), self.key(y), self.value(y))
        )
        if self.gated:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) if self.gated else F.gelu(self.up(y)))


def rotated(x: Tensor) -> Tensor:
    """Queries or keys (N, heads, tokens, width), each pair of channels turned by an angle that grows with its token.

    References:
        J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** -(torch.arange(half) / half))
    cosines, sines = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
    return x * cosines + torch.cat([-x[..., half:], x[..., :half]], -1) * sines


class LanguageModel(nn.Module):
    """Numbers of characters (N, tokens) to the logits of the next ones (N, tokens, len(ALPHABET)).

    References:
        A. Radford et al., "Language models are unsupervised multitask learners", 2019; H. Touvron et al., "LLaMA: open
        and efficient foundation language models", arXiv:2302.13971.
    """

    def __init__(self, gated: bool = False, width: int = 192, heads: int = 6, layers: int = 5) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = None if gated else nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, heads, gated) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, 1e-5) if gated else nn.LayerNorm(width, 1e-5)
        self.head = nn.Linear(width, len(ALPHABET), False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batches(samples: Tensor, size: int = 16) -> Iterator[tuple[Tensor]]:
    """What a model reads of samples."""
    for part in samples.split(size):
        yield (part[:, :-1],)
