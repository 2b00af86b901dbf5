"""Serve requests from a small Qwen3 model with a paged FP8 cache, compared with transformers' own `generate`.

python examples/serve.py                                # needs transformers: pip install -e ".[transformers]"

Requests come and go: each step admits requests that fit into the free pages, computes the prompts of new requests in
one call and one token of all others in another, and releases the pages of finished ones. The model's layers are
`weft.nn`'s, and its parameters are loaded under transformers' names. With a cache in the model's own dtype the tokens
are those of `generate`. With FP8 the cache takes little more than a quarter of the bytes; to count how often it chooses
the same token, each request continues with the tokens of `generate`, since one different choice changes all that
follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import weft.nn

try:
    import transformers
except ModuleNotFoundError:
    raise SystemExit('examples/serve.py needs transformers: pip install -e ".[transformers]"') from None

PAGE_SIZE = 16


# ---- the model ------------------------------------------------------------------------------------------


class Qwen3(nn.Module):
    """A dense Qwen3 with the parameters of transformers' `Qwen3ForCausalLM`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rotary = weft.nn.Rotary.of(config.rope_parameters)

        def layer() -> weft.nn.DecoderLayer:
            attention = weft.nn.Attention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                head_dim=config.head_dim,
                rotary=rotary,
                qk_norm=config.rms_norm_eps,
            )
            mlp = weft.nn.GLU(config.hidden_size, config.intermediate_size)
            return weft.nn.DecoderLayer(attention, mlp, eps=config.rms_norm_eps)

        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(layer() for _ in range(config.num_hidden_layers))
        self.model.norm = weft.nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = weft.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, caches: list[weft.KVCache], pages: weft.nn.Pages) -> Tensor:
        """Return the logits [sequences, vocabulary] of the token after the last one of ids [sequences, tokens]."""
        x = self.model.embed_tokens(ids)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, cache=cache, pages=pages)
        logits: Tensor = self.lm_head(self.model.norm(x[:, -1]))
        return logits


def cache_of(config: Any, pages: int, *, fp8: bool) -> weft.KVCache:
    """Return an empty cache of one layer. FP8 codes have a scale for each token and head."""
    shape = (pages, PAGE_SIZE, config.num_key_value_heads, config.head_dim)
    if not fp8:
        return weft.KVCache(torch.zeros(shape), torch.zeros(shape))
    codes = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
    return weft.KVCache(*codes, *(torch.ones(shape[:-1]) for _ in range(2)))


# ---- serving --------------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    forced: list[int] | None = None  # tokens to continue with instead of the chosen ones
    output: list[int] = field(default_factory=list)  # the chosen ones
    pages: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        return (self.output if self.forced is None else self.forced)[len(self.output) - 1]

    @property
    def max_pages(self) -> int:
        return -(-(len(self.prompt) + self.max_new_tokens) // PAGE_SIZE)


class Server:
    """Serves requests with `pages` pages of memory, as many at a time as fit."""

    def __init__(self, model: Qwen3, config: Any, *, pages: int, fp8: bool) -> None:
        self.model = model
        self.caches = [cache_of(config, pages, fp8=fp8) for _ in range(config.num_hidden_layers)]
        self.free = list(range(pages))
        self.most_at_once = 0

    @property
    def cache_bytes(self) -> int:
        return sum(t.nbytes for cache in self.caches for t in vars(cache).values() if isinstance(t, Tensor))

    @torch.no_grad()
    def serve(self, requests: list[Request]) -> None:
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            new = []
            while waiting and waiting[0].max_pages <= len(self.free):
                request = waiting.popleft()
                request.pages = [self.free.pop() for _ in range(request.max_pages)]
                new.append(request)
            if not new and not running:
                raise ValueError(f"a request of {waiting[0].max_pages} pages never fits")
            if running:
                self._advance(running, [[request.last] for request in running])
            if new:
                self._advance(new, [request.prompt for request in new])
            running += new
            self.most_at_once = max(self.most_at_once, len(running))
            for request in running:
                if len(request.output) == request.max_new_tokens:
                    self.free += request.pages
            running = [request for request in running if len(request.output) < request.max_new_tokens]

    def _advance(self, requests: list[Request], new: list[list[int]]) -> None:
        """Write the new tokens of each request to the cache, and choose the next one. Shorter inputs are
        left-padded."""
        tokens = max(map(len, new))
        ids = torch.tensor([[0] * (tokens - len(new_tokens)) + new_tokens for new_tokens in new])
        width = max(len(request.pages) for request in requests)
        table = torch.tensor([request.pages + [0] * (width - len(request.pages)) for request in requests])
        lengths = torch.tensor([len(request.prompt) + len(request.output) for request in requests])
        pages = weft.nn.Pages.of(table, lengths, tokens=tokens, page_size=PAGE_SIZE)
        chosen = self.model(ids, self.caches, pages).argmax(-1)
        for request, token in zip(requests, chosen.tolist(), strict=True):
            request.output.append(token)


# ---- comparison with transformers -----------------------------------------------------------------------


def build() -> tuple[Any, Any]:
    """Return a small transformers model with random parameters, and its configuration."""
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.1)
    return model, config


def requests(forced: list[list[int]] | None = None) -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    lengths = [(9, 12), (33, 7), (16, 16), (1, 20), (50, 5), (17, 9), (30, 11), (5, 14)]
    return [
        Request(torch.randint(3, 512, (n,), generator=draw).tolist(), max_new_tokens, forced and forced[i])
        for i, (n, max_new_tokens) in enumerate(lengths)
    ]


def main() -> tuple[float, float]:
    """Print the table; return the shares of tokens equal to those of `generate`: plain cache, FP8 cache."""
    reference, config = build()
    model = Qwen3(config).eval()
    model.load_state_dict(reference.state_dict())
    wanted = []
    for request in requests():
        ids = torch.tensor([request.prompt])
        out = reference.generate(
            ids, max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        wanted.append(out[0, ids.shape[1] :].tolist())
    shares = []
    print(f"{'cache':8}{'bytes':>10}{'at once':>10}   tokens equal to generate's")
    for fp8 in (False, True):
        server, served = Server(model, config, pages=16, fp8=fp8), requests(wanted if fp8 else None)
        server.serve(served)
        assert sorted(server.free) == list(range(16))
        same = sum(
            a == b for r, w in zip(served, wanted, strict=True) for a, b in zip(r.output, w, strict=True)
        )
        total = sum(map(len, wanted))
        shares.append(same / total)
        print(
            f"{'fp8' if fp8 else 'fp32':8}{server.cache_bytes:10,}{server.most_at_once:10}   {same} of {total}"
        )
    return shares[0], shares[1]


if __name__ == "__main__":
    main()
