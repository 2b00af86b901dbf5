"""Generate a robot's actions by flow matching: images and a prompt once, then ten replays of one captured step.

python examples/denoise.py                              # a small policy, in a minute
python examples/denoise.py --size pi05                  # the sizes of Pi0.5, 3.6 billion random parameters, in minutes

A vision encoder (SigLIP) turns patches of images into tokens. A language model (Gemma) reads them with the prompt and
leaves keys and values in a cache. An action expert attends to that cache in ten steps from noise to actions; its norms
add the gated residual, normalize, modulate by the time of the step and write the input of the next product.

The captured step reads its time from a counter on the device, so one recording serves all steps: a replay allocates
nothing, and the host reads nothing. The example compares it with the eager loop, bit for bit, and with the same policy
in plain PyTorch, in bf16 and in float64; then with products in FP8 whose scales were calibrated before and are frozen.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.nn
from weft.nn import Linear, numbers_for


@dataclass(frozen=True)
class Sizes:
    views: int  # images of a request
    image: int
    patch: int
    vision_width: int
    vision_mlp: int
    vision_heads: int
    vision_layers: int
    vocabulary: int
    prompt: int  # most tokens
    width: int  # of the language model
    mlp: int
    expert_width: int
    expert_mlp: int
    layers: int  # of the language model, and of the expert
    heads: int  # of both; they share one key head
    dim: int
    horizon: int  # actions of a chunk
    action: int
    steps: int

    @property
    def image_tokens(self) -> int:
        """Number of tokens of the images."""
        return self.views * (self.image // self.patch) ** 2


SIZES = {
    "small": Sizes(2, 28, 14, 64, 128, 2, 2, 512, 9, 128, 256, 64, 128, 6, 4, 32, 10, 32, 10),
    "pi05": Sizes(3, 224, 14, 1152, 4304, 16, 27, 257_152, 200, 2048, 16_384, 1024, 4096, 18, 8, 256, 10, 32, 10),
}  # fmt: skip


class Place(NamedTuple):
    """Where the actions of each request come in its cache."""

    positions: Tensor  # [batch, horizon]
    slots: Tensor  # [batch, horizon]
    lengths: Tensor  # [batch]: how many keys the actions see
    table: Tensor  # int32 [batch, 1]: each request has one page

    @staticmethod
    def of(lengths: Tensor, s: Sizes) -> Place:
        """Place the actions after the images and the first `lengths` tokens of the prompts."""
        request = torch.arange(len(lengths), device=lengths.device)[:, None]
        positions = s.image_tokens + lengths[:, None] + torch.arange(s.horizon, device=lengths.device)
        slots = positions + request * (s.image_tokens + s.prompt + s.horizon)
        return Place(positions, slots, positions[:, -1] + 1, request.int())


# ---- fused pieces -----------------------------------------------------------------------------------------


def add_and_norm(norm: nn.Module, h: Tensor, x: Tensor | None, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream h and normalize it, in the format that a layer takes; return (y, h)."""
    numbers = numbers_for(layer)
    return (norm(h, numbers=numbers), h) if x is None else norm(x, h, numbers=numbers)


def add_and_modulate(
    modulation: Tensor, h: Tensor, x: Tensor | None, gate: Tensor | None, layer: nn.Module
) -> Sequence[Tensor]:
    """Add x * gate to the residual stream h, normalize and modulate it; return (y, h, the next gate)."""
    numbers = numbers_for(layer)
    options: dict[str, Any] = {
        "modulation": modulation,
        "quantize": numbers.format,
        "quant_scale": numbers.scale,
    }
    if x is None:
        y, gate = weft.rms_norm(h, **options)
        return y, h, gate
    return weft.rms_norm(x, residual=h, residual_gate=gate, **options)


def activated(x: Tensor, layer: nn.Module, layout: Any = "concat") -> Tensor:
    """Apply GELU, as a gated unit unless the layout is "none", in the format that a layer takes."""
    numbers = numbers_for(layer)
    return weft.glu(x, act="gelu_tanh", layout=layout, quantize=numbers.format, quant_scale=numbers.scale)


# ---- the policy -------------------------------------------------------------------------------------------


class VisionLayer(nn.Module):
    """Layer of SigLIP."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        width = s.vision_width
        self.norm1, self.norm2 = weft.nn.LayerNorm(width, 1e-6), weft.nn.LayerNorm(width, 1e-6)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, s.vision_mlp), Linear(s.vision_mlp, width)
        self.heads = s.vision_heads

    def forward(self, h: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the result that is still to be added to it."""
        y, h = add_and_norm(self.norm1, h, x, self.qkv)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = self.out(weft.attention(q, k, v, layout="bshd").flatten(-2))
        y, h = add_and_norm(self.norm2, h, x, self.up)
        return h, self.down(activated(self.up(y), self.down, "none"))


class Vision(nn.Module):
    """SigLIP: images [images, height, width, 3] in uint8 to tokens [images, patches, width] of the language model."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.size = s.patch
        self.patch = Linear(3 * s.patch**2, s.vision_width)
        self.positions = nn.Parameter(0.02 * torch.randn((s.image // s.patch) ** 2, s.vision_width))
        self.layers = nn.ModuleList(VisionLayer(s) for _ in range(s.vision_layers))
        self.norm = weft.nn.LayerNorm(s.vision_width, 1e-6)
        self.project = Linear(s.vision_width, s.width)

    def forward(self, images: Tensor) -> Tensor:
        patches = weft.patchify(images, self.size, mean=0.5, std=0.5, out_dtype=self.positions.dtype)
        positions = self.positions.expand(len(images), -1, -1)
        h, x = weft.matmul(patches, self.patch.weight.T, bias=self.patch.bias, residual=positions), None
        for layer in self.layers:
            h, x = layer(h, x)
        y, _ = add_and_norm(self.norm, h, x, self.project)
        return self.project(y)


class GemmaNorm(nn.RMSNorm):
    """RMSNorm whose weights are stored around zero."""

    def forward(self, x: Tensor, residual: Tensor | None = None, *, numbers: weft.nn.Numbers) -> Any:
        return weft.rms_norm(
            x,
            self.weight,
            weight_offset=1.0,
            residual=residual,
            quantize=numbers.format,
            quant_scale=numbers.scale,
        )


class Layer(nn.Module):
    """Layer of Gemma. Norms of the language model have weights; the time of a step modulates those of the expert."""

    def __init__(self, s: Sizes, width: int, mlp: int, *, modulated: bool) -> None:
        super().__init__()
        self.qkv = Linear(width, (s.heads + 2) * s.dim, bias=False)
        self.out = Linear(s.heads * s.dim, width, bias=False)
        self.gate_up, self.down = Linear(width, 2 * mlp, bias=False), Linear(mlp, width, bias=False)
        if not modulated:
            self.norm1, self.norm2 = GemmaNorm(width), GemmaNorm(width)
            for norm in (self.norm1, self.norm2):
                nn.init.normal_(norm.weight, std=0.1)


class Policy(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes, width = s, s.expert_width
        self.vision, self.embed = Vision(s), nn.Embedding(s.vocabulary, s.width)
        self.reader = nn.ModuleList(Layer(s, s.width, s.mlp, modulated=False) for _ in range(s.layers))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.modulation = nn.Linear(width, (2 * s.layers + 1) * 3 * width)
        self.expert = nn.ModuleList(Layer(s, width, s.expert_mlp, modulated=True) for _ in range(s.layers))
        self.action_in, self.action_out = Linear(s.action, width), Linear(width, s.action)
        self.prepare: dict[str, Any] = {
            "heads": weft.Heads(q=s.heads, kv=1, dim=s.dim), "rotation": weft.Rotation(10000.0)
        }  # fmt: skip

    def forward(self, images: Tensor, prompt: Tensor, lengths: Tensor, noise: Tensor) -> Tensor:
        """Return actions [batch, horizon, action] for images [batch, views, height, width, 3] in uint8, prompts whose
        first `lengths` tokens count, and noise of the shape of the actions."""
        return Denoiser(self, len(prompt)).run(images, prompt, lengths, noise)

    def read(self, images: Tensor, prompt: Tensor, lengths: Tensor, caches: Sequence[weft.KVCache]) -> None:
        """Write the keys and values of images and prompts to the caches of the layers."""
        batch, s = len(prompt), self.sizes
        vision, tokens = self.vision(images.flatten(0, 1)), self.embed(prompt) * s.width**0.5
        h, x = torch.cat([vision.reshape(batch, s.image_tokens, s.width), tokens], 1), None
        request = torch.arange(batch, device=h.device)[:, None]
        slots = torch.arange(h.shape[1], device=h.device) + request * caches[0].k.shape[1]
        for layer, cache in zip(self.reader, caches, strict=True):
            y, h = add_and_norm(layer.norm1, h, x, layer.qkv)
            q, k, v, _ = weft.qkv_prepare(layer.qkv(y), **self.prepare, cache=cache, slots=slots)
            if layer is self.reader[-1]:
                return  # the expert needs no more of it
            a = weft.attention(q, k, v, kv_lengths=s.image_tokens + lengths, layout="bshd")
            y, h = add_and_norm(layer.norm2, h, layer.out(a.flatten(-2)), layer.gate_up)
            x = layer.down(activated(layer.gate_up(y), layer.down))

    def embedded(self, step: Tensor) -> Tensor:
        """Embed the times of steps: [..., width], in fp32."""
        s, device = self.sizes, step.device
        time = 1.0 - step / s.steps
        periods = 0.004 * 1000.0 ** torch.linspace(0, 1, s.expert_width // 2, device=device)
        angles = time[..., None] * (2 * torch.pi / periods)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def modulations(self) -> Tensor:
        """Return scale, shift and gate of all norms at all steps: [steps, norms * 3 * width]."""
        steps = torch.arange(self.sizes.steps, device=self.modulation.weight.device)
        return self.modulation(self.time(self.embedded(steps).to(self.modulation.weight.dtype)))

    def velocity(
        self, actions: Tensor, modulations: Tensor, at: Place, caches: Sequence[weft.KVCache]
    ) -> Tensor:
        """Return the velocity of noisy actions; `modulations` [1, norms, 3 * width] are those of this step."""
        h, x, gate = self.action_in(actions), None, None
        norms = iter(modulations.unbind(1))
        for layer, cache in zip(self.expert, caches, strict=True):
            y, h, gate = add_and_modulate(next(norms), h, x, gate, layer.qkv)
            q, *_ = weft.qkv_prepare(
                layer.qkv(y), **self.prepare, positions=at.positions, cache=cache, slots=at.slots
            )
            # Actions see each other, and all heads share one key head: the heads of all actions act as one token's.
            a = weft.attention_decode(q.flatten(1, 2), cache, page_table=at.table, lengths=at.lengths)
            y, h, gate = add_and_modulate(
                next(norms), h, layer.out(a.view(*y.shape[:2], -1)), gate, layer.gate_up
            )
            x = layer.down(activated(layer.gate_up(y), layer.down))
        y, *_ = add_and_modulate(next(norms), h, x, gate, self.action_out)
        return self.action_out(y)


class Denoiser:
    """Memory of a policy for requests of one batch size. `run` takes ten steps; after `capture` it replays one."""

    def __init__(self, policy: Policy, batch: int) -> None:
        self.policy, self.sizes, like = policy, policy.sizes, policy.action_in.weight
        s = self.sizes
        shape = (batch, s.image_tokens + s.prompt + s.horizon, 1, s.dim)
        self.caches = [weft.KVCache(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(s.layers)]
        self.actions = like.new_zeros(batch, s.horizon, s.action, dtype=torch.float32)
        self.noisy = like.new_zeros(self.actions.shape)
        self.counter, self.one = torch.tensor([[0], [1]], device=like.device).unbind()
        self.modulations = policy.modulations()
        self.step: Callable[..., Tensor] = self.eager_step

    def capture(self) -> weft.Captured[Tensor]:
        """Record a step, to be replayed from now on; return the recording."""
        lengths = torch.zeros(len(self.actions), dtype=torch.int64, device=self.counter.device)
        self.step = replays = weft.capture(self.eager_step, *Place.of(lengths, self.sizes))
        return replays

    def run(self, images: Tensor, prompt: Tensor, lengths: Tensor, noise: Tensor) -> Tensor:
        """Return the actions, in memory that the next run uses again."""
        self.policy.read(images, prompt, lengths, self.caches)
        return self.denoise(lengths, noise)

    def denoise(self, lengths: Tensor, noise: Tensor) -> Tensor:
        """Take all steps, given what the caches hold."""
        at = Place.of(lengths, self.sizes)
        self.actions.copy_(noise)
        self.counter.zero_()
        for _ in range(self.sizes.steps):
            self.step(*at)
        return self.actions

    def eager_step(self, *at: Tensor) -> Tensor:
        """Move the actions by one step, and count it."""
        width = 3 * self.sizes.expert_width
        modulations = weft.gather_rows(self.modulations, self.counter).unflatten(-1, (-1, width))
        self.noisy.copy_(self.actions)
        velocity = self.policy.velocity(self.noisy, modulations, Place(*at), self.caches)
        weft.axpby(self.actions, (-1.0 / self.sizes.steps, velocity), out=self.actions)
        self.counter.add_(self.one)
        return self.actions


# ---- the same policy in plain PyTorch -------------------------------------------------------------------


class Plain:
    """The policy as one would write it in PyTorch, with the same parameters, in another dtype."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.policy, self.sizes, self.dtype = policy, policy.sizes, dtype
        self.exact = torch.promote_types(dtype, torch.float32)

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        return F.linear(x, layer.weight.to(self.dtype), bias)

    def layer_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], norm.weight.to(self.dtype), norm.bias.to(self.dtype), norm.eps)

    def normalized(self, x: Tensor) -> Tensor:
        x = x.to(self.exact)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def rms_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return (self.normalized(x) * (1 + norm.weight.to(self.exact))).to(self.dtype)

    def modulated(self, modulation: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = modulation.chunk(3, -1)
        return (self.normalized(x) * (1 + scale) + shift).to(self.dtype), gate

    def rotated(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = angles
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.sizes.dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.cat([positions[:, None, :, None] * frequencies] * 2, -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def heads(
        self, layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        s = self.sizes
        q, k, v = self.linear(layer.qkv, x).split([s.heads * s.dim, s.dim, s.dim], -1)
        q = q.unflatten(-1, (s.heads, s.dim)).transpose(1, 2)
        return self.rotated(q, angles), self.rotated(k[:, None], angles), v[:, None]

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        a = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.linear(layer.out, a.transpose(1, 2).flatten(2))

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        gate, up = self.linear(layer.gate_up, x).chunk(2, -1)
        return self.linear(layer.down, F.gelu(gate, approximate="tanh") * up)

    def vision(self, images: Tensor) -> Tensor:
        vision, s, p = self.policy.vision, self.sizes, self.sizes.patch
        x = ((images.to(self.exact) / 255 - 0.5) / 0.5).to(self.dtype)
        x = x.unflatten(2, (-1, p)).unflatten(1, (-1, p)).transpose(2, 3).flatten(1, 2).flatten(2)
        h = self.linear(vision.patch, x) + vision.positions.to(self.dtype)
        for layer in vision.layers:
            qkv = self.linear(layer.qkv, self.layer_norm(layer.norm1, h)).unflatten(
                -1, (3, s.vision_heads, -1)
            )
            h = h + self.attend(layer, *qkv.transpose(1, 3).unbind(2), None)
            up = F.gelu(self.linear(layer.up, self.layer_norm(layer.norm2, h)), approximate="tanh")
            h = h + self.linear(layer.down, up)
        return self.linear(vision.project, self.layer_norm(vision.norm, h))

    def read(self, images: Tensor, prompt: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of all layers."""
        s, policy, caches = self.sizes, self.policy, []
        tokens = F.embedding(prompt, policy.embed.weight).to(self.dtype) * s.width**0.5
        h = torch.cat(
            [self.vision(images.flatten(0, 1)).reshape(len(prompt), s.image_tokens, s.width), tokens], 1
        )
        position = torch.arange(h.shape[1])
        mask, angles = self.mask(lengths), self.angles(position[None])
        for layer in policy.reader:
            q, k, v = self.heads(layer, self.rms_norm(layer.norm1, h), angles)
            caches.append((k, v))
            if layer is policy.reader[-1]:
                break
            h = h + self.attend(layer, q, k, v, mask)
            h = h + self.mlp(layer, self.rms_norm(layer.norm2, h))
        return caches

    def mask(self, lengths: Tensor) -> Tensor:
        """Return which tokens of the prefix exist: [batch, 1, 1, tokens]."""
        return (
            torch.arange(self.sizes.image_tokens + self.sizes.prompt)
            < self.sizes.image_tokens + lengths[:, None]
        )[:, None, None]

    def modulations(self, step: Tensor) -> Iterator[Tensor]:
        """Yield scale, shift and gate of each norm in turn."""
        policy, width = self.policy, 3 * self.sizes.expert_width
        x = policy.embedded(step).to(self.dtype)
        for layer in policy.time:
            x = self.linear(layer, x) if isinstance(layer, nn.Linear) else layer(x)
        weights, biases = policy.modulation.weight.to(self.dtype), policy.modulation.bias.to(self.dtype)
        for weight, bias in zip(weights.split(width), biases.split(width), strict=True):
            yield F.linear(x, weight, bias)

    def velocity(
        self, actions: Tensor, step: Tensor, lengths: Tensor, caches: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        s, policy = self.sizes, self.policy
        mask = F.pad(self.mask(lengths), (0, s.horizon), value=True)
        angles = self.angles(s.image_tokens + lengths[:, None] + torch.arange(s.horizon))
        h, norms = self.linear(policy.action_in, actions.to(self.dtype)), self.modulations(step)
        for layer, (keys, values) in zip(policy.expert, caches, strict=True):
            y, gate = self.modulated(next(norms), h)
            q, k, v = self.heads(layer, y, angles)
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            h = h + self.attend(layer, q, k, v, mask) * gate
            y, gate = self.modulated(next(norms), h)
            h = h + self.mlp(layer, y) * gate
        return self.linear(policy.action_out, self.modulated(next(norms), h)[0])

    def run(self, images: Tensor, prompt: Tensor, lengths: Tensor, noise: Tensor) -> Tensor:
        caches, actions = self.read(images, prompt, lengths), noise.to(self.exact)
        for step in torch.arange(self.sizes.steps):
            actions = actions - self.velocity(actions, step, lengths, caches) / self.sizes.steps
        return actions


# ---- comparison -----------------------------------------------------------------------------------------


def request(s: Sizes, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw images, prompts, their lengths and noise."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (batch, s.views, s.image, s.image, 3), generator=draw, dtype=torch.uint8)
    prompt = torch.randint(s.vocabulary, (batch, s.prompt), generator=draw)
    lengths = torch.randint(1, s.prompt + 1, (batch,), generator=draw)
    return images, prompt, lengths, torch.randn(batch, s.horizon, s.action, generator=draw)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def is_inner(name: str, module: nn.Module) -> bool:
    """Return whether a layer is inside of the vision encoder, the language model or the expert."""
    return name.startswith(("vision.layers", "reader", "expert"))


class Row(NamedTuple):
    """Line of the table."""

    name: str
    error: float  # relative, of what is added to the noise, against float64
    kernels: int | None  # launches of a step, and operations of PyTorch that do not only return a view


def build(s: Sizes) -> Policy:
    """Return a policy with random parameters in bf16."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Policy(s).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def main(size: str = "small", batch: int = 1) -> list[Row]:
    """Print the table, and return it."""
    s, policy = SIZES[size], build(SIZES[size])
    images, prompt, lengths, noise = inputs = request(s, batch)
    exact = Plain(policy, torch.float64).run(*inputs) - noise
    rows = []

    def add(name: str, actions: Tensor, operations: int | None) -> None:
        rows.append(Row(name, relative_error(actions - noise, exact), operations))

    def add_replays(name: str) -> None:
        denoiser = Denoiser(policy, batch)
        eager = denoiser.run(*inputs).clone()
        replays = denoiser.capture()
        assert torch.equal(denoiser.run(*inputs), eager), "replays differ from the eager loop"
        add(name, eager, replays.operations)

    plain = Plain(policy, torch.bfloat16)
    caches = plain.read(images, prompt, lengths)
    one_step = weft.capture(
        lambda x, t: x - plain.velocity(x, t, lengths, caches) / s.steps, noise, torch.tensor(0)
    )
    add("PyTorch, bf16", plain.run(*inputs), one_step.operations)
    add_replays("Weft, bf16")
    with tempfile.TemporaryDirectory() as folder:
        scales = Path(folder) / "scales.json"
        batches = (request(s, batch, seed) for seed in range(1, 9))
        weft.calibrate(policy, batches, out=scales, filter=is_inner)
        weft.nn.convert(policy, "fp8_static", scales=scales, filter=is_inner)
    add_replays("Weft, FP8 with frozen scales")

    print(f"{'':30}{'error of actions':>18}{'kernels of a step':>20}")
    for row in rows:
        print(f"{row.name:30}{row.error:18.4f}{row.kernels:20}")
    print(f"{s.steps} replays of one captured step equal the eager loop, bit for bit")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    arguments = parser.parse_args()
    main(arguments.size, arguments.batch)
