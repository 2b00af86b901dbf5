"""Serve requests from a small Qwen3 model with a paged FP8 cache, compared with transformers' own `generate`.

python examples/serve.py                                # needs transformers: pip install -e ".[transformers]"

Requests come and go: a step admits requests that fit into the free pages, and releases the pages of finished ones.
Every request takes the same number of tokens in a step: a chunk of its prompt, or its newest token and drafts of the
next ones, which are looked up in what it has read and written so far. A step is captured once for each number of
requests. It draws tokens, verifies drafts and writes the cache on the device; the host reads the tokens, once.

The model's layers are `weft.nn`'s, and its parameters are loaded under transformers' names. With a cache in the model's
own dtype the tokens are those of `generate`, with and without drafts, and drafts do not change tokens that are drawn.
With FP8 the cache takes little more than a quarter of the bytes; to count how often it chooses the same token, each
request continues with the tokens of `generate`, since one different choice changes all that follow.
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
        """Return the logits [sequences, tokens, vocabulary] of the token after each of ids [sequences, tokens]."""
        x = self.model.embed_tokens(ids)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, cache=cache, pages=pages)
        logits: Tensor = self.lm_head(self.model.norm(x))
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
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    output: list[int] = field(default_factory=list)  # the chosen ones
    pages: list[int] = field(default_factory=list)
    read: int = 0  # tokens of the prompt that are in the cache

    @property
    def context(self) -> list[int]:
        return self.prompt + (self.output if self.forced is None else self.forced[: len(self.output)])

    @property
    def is_done(self) -> bool:
        return len(self.output) == self.max_new_tokens

    def drafts(self, count: int) -> list[int]:
        """Return what followed the last two tokens where they occurred before."""
        context = self.context
        if self.forced is not None:
            return []
        for i in range(len(context) - 3, -1, -1):
            if context[i : i + 2] == context[-2:]:
                return context[i + 2 : i + 2 + count]
        return []

    def take(self, tokens: int) -> tuple[list[int], int]:
        """Return the tokens of the next step, -1 for none, and how many of the request the cache then holds."""
        if self.read < len(self.prompt):
            self.read = min(self.read + tokens, len(self.prompt))
            chunk = self.prompt[max(self.read - tokens, 0) : self.read]
            return [-1] * (tokens - len(chunk)) + chunk, self.read
        drafts = self.drafts(tokens - 1)
        newest = [self.context[-1], *drafts, *[-1] * (tokens - 1 - len(drafts))]
        return newest, len(self.context) + tokens - 1


class Server:
    """Serves requests with `pages` pages of memory, as many at a time as fit, with up to `drafts` drafts for each."""

    def __init__(self, model: Qwen3, config: Any, *, pages: int, fp8: bool, drafts: int = 4) -> None:
        self.model, self.tokens = model, drafts + 1
        self.caches = [cache_of(config, pages, fp8=fp8) for _ in range(config.num_hidden_layers)]
        self.free = list(range(pages))
        self.most_at_once = self.steps = self.accepted = 0
        self.captured: dict[int, weft.Captured[Tensor]] = {}

    @property
    def cache_bytes(self) -> int:
        return sum(t.nbytes for cache in self.caches for t in vars(cache).values() if isinstance(t, Tensor))

    def pages_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_new_tokens + self.tokens) // PAGE_SIZE)

    @torch.no_grad()
    def serve(self, requests: list[Request]) -> None:
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            while waiting and self.pages_of(waiting[0]) <= len(self.free):
                request = waiting.popleft()
                request.pages = [self.free.pop() for _ in range(self.pages_of(request))]
                running.append(request)
            if not running:
                raise ValueError(f"a request of {self.pages_of(waiting[0])} pages never fits")
            self.most_at_once = max(self.most_at_once, len(running))
            self.advance(running)
            for request in running:
                if request.is_done:
                    self.free += request.pages
            running = [request for request in running if not request.is_done]

    def advance(self, requests: list[Request]) -> None:
        """Take one step with each request: a chunk of its prompt, or its newest token and drafts."""
        size = 1 << (len(requests) - 1).bit_length()  # requests of the captured step; the others are idle
        idle = size - len(requests)
        taken = [request.take(self.tokens) for request in requests]
        width = len(self.free) + sum(len(request.pages) for request in requests)
        tables = [request.pages + [0] * (width - len(request.pages)) for request in requests]
        settings = [(request.temperature, request.top_p) for request in requests]
        numbers = [(length, r.seed, len(r.output)) for (_, length), r in zip(taken, requests, strict=True)]
        inputs = (
            torch.tensor([tokens for tokens, _ in taken] + [[-1] * self.tokens] * idle),
            torch.tensor(tables + [[0] * width] * idle, dtype=torch.int32),
            torch.tensor(settings + [(0.0, 1.0)] * idle),
            torch.tensor(numbers + [(0, 0, 0)] * idle),
        )
        if size not in self.captured:
            self.captured[size] = weft.capture(self.step, *inputs)
        drawn = self.captured[size](*inputs).tolist()
        self.steps += 1
        for request, (first, accepted, *verified) in zip(requests, drawn, strict=False):
            if request.read < len(request.prompt):
                continue
            new = verified[: accepted + 1] if request.output else [first]
            self.accepted += len(new) - 1
            request.output += new[: request.max_new_tokens - len(request.output)]

    def step(self, tokens: Tensor, table: Tensor, settings: Tensor, numbers: Tensor) -> Tensor:
        """Return for each request: the token after a prompt, the number of accepted drafts, and these with the token
        after them. A request whose cache holds no tokens is idle."""
        (temperature, top_p), (lengths, seed, step) = settings.unbind(1), numbers.unbind(1)
        pages = weft.nn.Pages.of(table, lengths, tokens=self.tokens, page_size=PAGE_SIZE)
        logits = self.model(tokens.clamp(min=0), self.caches, pages)
        options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "step": step}
        first = weft.sample(logits[:, -1], **options).tokens
        verified = weft.verify(logits, tokens[:, 1:], **options)
        return torch.cat([first[:, None], verified.accepted[:, None], verified.tokens], 1)


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


def requests(forced: list[list[int]] | None = None, *, temperature: float = 0.0) -> list[Request]:
    """Return requests whose prompts repeat themselves, as texts do."""
    draw = torch.Generator().manual_seed(1)
    lengths = [(9, 12), (33, 7), (16, 16), (1, 20), (50, 5), (17, 9), (30, 11), (5, 14)]
    made = []
    for i, (n, max_new_tokens) in enumerate(lengths):
        prompt = (torch.randint(3, 512, (-(-n // 2),), generator=draw).tolist() * 2)[:n]
        own = forced and forced[i]
        made.append(Request(prompt, max_new_tokens, own, temperature, top_p=0.95, seed=i))
    return made


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
    total = sum(map(len, wanted))

    def served(given: list[Request], **options: Any) -> tuple[Server, list[list[int]]]:
        server = Server(model, config, pages=24, **options)
        server.serve(given)
        assert sorted(server.free) == list(range(24))
        return server, [request.output for request in given]

    def equal(outputs: list[list[int]], others: list[list[int]]) -> int:
        return sum(
            a == b for mine, its in zip(outputs, others, strict=True) for a, b in zip(mine, its, strict=True)
        )

    shares = []
    print(
        f"{'cache':8}{'bytes':>10}{'drafts':>8}{'accepted':>10}{'steps':>7}{'at once':>9}   tokens equal to generate's"
    )
    for fp8, drafts in ((False, 0), (False, 4), (True, 4)):
        server, outputs = served(requests(wanted if fp8 else None), fp8=fp8, drafts=drafts)
        same = equal(outputs, wanted)
        shares.append(same / total)
        cache = "fp8" if fp8 else "fp32"
        counts = f"{drafts:8}{server.accepted:10}{server.steps:7}{server.most_at_once:9}"
        print(f"{cache:8}{server.cache_bytes:10,}{counts}   {same} of {total}")
    plain, one = served(requests(temperature=0.2), fp8=False, drafts=0)
    drafted, other = served(requests(temperature=0.2), fp8=False)
    print(
        f"drawn at temperature 0.2: {equal(one, other)} of {total} tokens equal without drafts ({plain.steps} steps) "
        f"and with them ({drafted.steps}, {drafted.accepted} accepted)"
    )
    assert one == other
    return min(shares[:2]), shares[2]


if __name__ == "__main__":
    main()
