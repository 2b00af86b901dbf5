"""Train a small mixture of experts in the precision of your choice, and compare the loss curves.

    python examples/train_moe.py                                            # 60 steps: one to two minutes on two cores
    python examples/train_moe.py --recipe bf16 --steps 600 --json runs/bf16.json
    python examples/train_moe.py --recipe fp8_block --steps 600 --json runs/fp8_block.json
    python examples/train_moe.py --plot curves.png runs/*.json              # needs matplotlib: pip install -e ".[plot]"
    torchrun --nproc-per-node 2 examples/train_moe.py --recipe fp8_block    # FSDP2: Gloo on CPUs, NCCL on GPUs

The model predicts the next byte of Python's own standard library, a text that every machine with Python has. One file
in ten is kept for validation. The recipe sets the precision of the projections and experts, forward and backward. The
router, the loss and the master weights stay in fp32; the residual stream, the embedding and the head in bf16. With the
recipe "fp32", everything is in fp32. All of it uses Weft's ops, except attention itself, which is PyTorch's
`scaled_dot_product_attention`, used for the runs in docs/runs. `weft.attention` takes the same arguments.

A seed determines weights and batches, whatever the recipe and the number of ranks, so curves can be compared step by
step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import weft

RECIPES = ("fp32", "bf16", "fp8_block", "fp8_row", "fp8_tensor", "mxfp8", "nvfp4", "int8_row")
BYTES = 256  # the vocabulary
Run = dict[str, Any]  # record of a run, as written to JSON and to checkpoints


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """Settings of a run. Each field is a command-line flag. Block-scaled FP8 needs matrix sizes that are multiples of
    128."""

    recipe: str = option("bf16", "precision of the products")
    steps: int = option(60, "steps of the optimizer")
    seed: int = option(0, "seed of the initial weights and of the batches")
    layers: int = option(4, "blocks of attention and experts")
    hidden: int = option(256, "width of the residual stream")
    heads: int = option(4, "attention heads")
    experts: int = option(8, "experts per layer")
    top_k: int = option(2, "experts per token")
    width: int = option(384, "hidden width of an expert")
    sequence: int = option(128, "bytes per sequence")
    sequences: int = option(8, "sequences per step, divided among the ranks")
    learning_rate: float = option(2e-3, "peak learning rate, after the warm-up")
    validate_every: int = option(50, "steps between two validations, and between two checkpoints")


# ---- the text ---------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    train: Tensor  # uint8, file after file
    validation: Tensor


def standard_library() -> Text:
    """Return the sources of the standard library without its tests; a file's name decides its split."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if others.isdisjoint(name.parts):
            parts[zlib.crc32(name.as_posix().encode()) % 10 == 0].append(path.read_bytes())
    return Text(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts))


def batch(text: Tensor, config: Config, *, seed: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return this rank's sequences of the batch of this seed, and the byte after each of theirs."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - config.sequence, (config.sequences,), generator=generator)
    starts = starts[ranks.rank :: ranks.number]
    tokens = text[starts[:, None] + torch.arange(config.sequence + 1)].to(ranks.device, torch.int64)
    return tokens[:, :-1], tokens[:, 1:]


# ---- the model --------------------------------------------------------------------------------------------------


def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
    """Return weights that preserve the scale of their input, times `scale`."""
    return nn.Parameter(torch.randn(shape) * (scale * shape[-1] ** -0.5))


class Block(nn.Module):
    """Attention, then a mixture of experts; each adds to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, experts, width = config.hidden, config.experts, config.width
        self.top_k = config.top_k
        self.recipe = None if config.recipe == "fp32" else config.recipe  # None: products in the dtype of x
        self.heads = weft.Heads(q=config.heads, kv=config.heads, dim=hidden // config.heads)
        self.rotation = weft.Rotation(10000.0)
        small = (2 * config.layers) ** -0.5  # so that the stream does not grow with the number of layers
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = matrix(self.heads.width, hidden)
        self.out = matrix(hidden, hidden, scale=small)
        self.experts_norm = nn.Parameter(torch.ones(hidden))
        self.router = matrix(experts, hidden)
        self.up = matrix(experts, 2 * width, hidden)  # an expert's gate, then what it gates
        self.down = matrix(experts, hidden, width, scale=small)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream [batch, sequence, hidden] after this block, and the loss that balances the experts."""
        x = self.attention(weft.rms_norm(h, self.attention_norm))
        x, h = weft.rms_norm(x, self.experts_norm, residual=h)  # one kernel adds and normalizes
        x, balance = self.mixture(x.flatten(0, 1))
        return h + x.view_as(h), balance

    def attention(self, x: Tensor) -> Tensor:
        qkv = weft.linear(x, self.qkv, recipe=self.recipe)
        # One kernel splits the projection into q, k and v, rotates q and k, and transposes all three.
        q, k, v, _ = weft.qkv_prepare(qkv, heads=self.heads, rotation=self.rotation, out_layout="bhsd")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return weft.linear(y.transpose(1, 2).flatten(2), self.out, recipe=self.recipe)

    def mixture(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = weft.router_linear(x, self.router)  # in fp32 from here to the weights of the experts
        routing = weft.route(logits, self.top_k, convention="mixtral", balance_coefficient=0.01)
        return weft.experts(x, self.up, self.down, routing, recipe=self.recipe), routing.balance_loss


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.dtype = torch.float32 if config.recipe == "fp32" else torch.bfloat16  # of activations
        self.embedding = nn.Parameter(torch.randn(BYTES, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = matrix(BYTES, config.hidden, scale=0.1)  # at first all bytes are about equally likely

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of predicting the targets in nats per byte, and the sum of the balance losses."""
        h = F.embedding(tokens, self.embedding).to(self.dtype)
        balances = []
        for block in self.blocks:
            h, balance = block(h)
            balances.append(balance)
        # Head and loss are one op, which never materializes the logits.
        head = self.head.to(self.dtype)
        loss = weft.linear_cross_entropy(weft.rms_norm(h, self.norm), head, targets)
        return loss, torch.stack(balances).sum()


# ---- ranks, memory and checkpoints --------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """This process among those that `torchrun` has started: a single one without it."""

    rank: int = 0
    number: int = 1
    device: str = "cpu"

    @staticmethod
    def join() -> Ranks:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if "RANK" not in os.environ:
            return Ranks(device=device)
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return Ranks(dist.get_rank(), dist.get_world_size(), device)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all ranks, outside autograd."""
        value = value.detach() / self.number
        if self.number > 1:
            dist.all_reduce(value)
        return value


@contextlib.contextmanager
def count_saved() -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that forward saves for backward, excluding parameters."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            names = tensor.__tensor_flatten__()[0] if isinstance(tensor, weft.QTensor) else ()
            for tensor_part in [getattr(tensor, name) for name in names] or [tensor]:
                sizes[tensor_part.untyped_storage().data_ptr()] = tensor_part.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


# Full tensors instead of shards, so that any number of ranks can resume from a checkpoint.
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(directory: Path, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer, options=FULL)  # a collective: all ranks take part
    if not dist.is_initialized() or dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({"run": run, "weights": weights, "moments": moments}, directory / "next.pt")
        (directory / "next.pt").replace(directory / "last.pt")  # atomic, so that it is always complete


def resume(directory: Path, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """Load the checkpoint, if there is one, and return the run so far."""
    if not (directory / "last.pt").exists():
        return run
    saved: dict[str, Run] = torch.load(directory / "last.pt", mmap=True)
    if saved["run"]["config"] != run["config"]:
        raise SystemExit(f"{directory} has a run of another configuration: {saved['run']['config']}")
    states = {"model_state_dict": saved["weights"], "optim_state_dict": saved["moments"]}
    set_state_dict(model, optimizer, **states, options=FULL)
    return saved["run"]


# ---- training -----------------------------------------------------------------------------------------------------


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up over a twentieth of the steps, then half a cosine down to a tenth."""
    warm = max(1, config.steps // 20)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, config.steps - warm)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, config: Config, ranks: Ranks) -> float:
    """Return the mean loss of eight batches, the same ones every time."""
    losses = [model(*batch(text, config, seed=seed, ranks=ranks))[0] for seed in range(8)]
    return float(ranks.mean(torch.stack(losses).mean()))


def train(config: Config, ranks: Ranks, *, compiled: bool = False, checkpoint: Path | None = None) -> Run:
    """Train a model and return the record of the run."""
    if config.sequences % ranks.number:
        raise SystemExit(f"{config.sequences} sequences cannot be divided among {ranks.number} ranks")
    text = standard_library()
    model = Model(config).to(ranks.device)
    run: Run = {
        "config": asdict(config),
        "python": platform.python_version(),  # each version has another standard library
        "parameters": sum(p.numel() for p in model.parameters()),
        "train": [],  # the loss of every step
        "validation": [],  # [step, loss]
        "seconds": 0.0,
        "saved_bytes": 0,  # peak bytes that a forward of this rank saved for its backward
    }
    for part in (*model.blocks, model):
        if compiled and part is not model:
            part.compile()
        if ranks.number > 1:
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    if checkpoint:
        run = resume(checkpoint, run, model, optimizer)

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, disable=ranks.rank > 0) as progress:
        bar = progress.add_task(config.recipe, total=config.steps, completed=len(run["train"]))
        begin = time.perf_counter() - run["seconds"]
        for step in range(len(run["train"]), config.steps):
            with count_saved() as saved:
                seed = (config.seed << 32) + step
                loss, balance = model(*batch(text.train, config, seed=seed, ranks=ranks))
            (loss + balance).backward()
            weft.clip_grads_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.step()
            optimizer.zero_grad()

            run["train"].append(float(ranks.mean(loss)))  # the only place in a step that waits for the device
            run["saved_bytes"] = max(run["saved_bytes"], sum(saved.values()))
            done = step + 1
            if done % config.validate_every == 0 or done == config.steps:
                run["validation"].append([done, validate(model, text.validation, config, ranks)])
                run["seconds"] = time.perf_counter() - begin
                if ranks.rank == 0:
                    progress.console.print(f"step {done}: validation loss {run['validation'][-1][1]:.3f}")
                if checkpoint:
                    save(checkpoint, run, model, optimizer)
            progress.update(bar, advance=1, description=f"{config.recipe} {run['train'][-1]:.3f}")
    return run


# ---- command line -----------------------------------------------------------------------------------------------


def plot(file: Path, paths: list[Path]) -> None:
    """Plot the loss curves of runs, and the differences from the first."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        raise SystemExit('--plot needs matplotlib: pip install -e ".[plot]"') from None
    runs = [json.loads(path.read_text()) for path in paths]
    names = [run["config"]["recipe"] for run in runs]
    first = dict(runs[0]["validation"])
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 7), height_ratios=(3, 2))
    for name, run in zip(names, runs, strict=True):
        steps, losses = zip(*run["validation"], strict=True)
        (line,) = above.plot(steps, losses, marker=".", label=f"{name}: {losses[-1]:.3f}")
        above.plot(range(1, len(run["train"]) + 1), run["train"], color=line.get_color(), alpha=0.2)
        shared = [(step, loss - first[step]) for step, loss in run["validation"] if step in first]
        below.plot(*zip(*shared, strict=True), marker=".", color=line.get_color())
    above.set(ylabel="loss, nats per byte")
    above.legend(title="validation")
    below.set(xlabel="step", ylabel=f"validation minus that of {names[0]}")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def flags() -> argparse.Namespace:
    about, commands = __doc__.split("\n\n")[:2]
    parser = argparse.ArgumentParser(
        description=about, epilog=commands, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for setting in fields(Config):
        flag, help_text = (
            f"--{setting.name.replace('_', '-')}",
            f"{setting.metadata['help']} (default: {setting.default})",
        )
        options: dict[str, Any] = {"choices": RECIPES} if setting.name == "recipe" else {"metavar": "N"}
        parser.add_argument(
            flag, type=type(setting.default), default=setting.default, help=help_text, **options
        )
    parser.add_argument("--compile", action="store_true", help="compile the blocks with torch.compile")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save checkpoints there, and resume from the last one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the loss curve to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves of runs, without training")
    parser.add_argument("runs", type=Path, nargs="*", help="files that --json wrote, for --plot")
    args = parser.parse_args()
    if bool(args.plot) != bool(args.runs):
        parser.error("--plot and the files of runs go together")
    for setting in fields(Config):
        value = getattr(args, setting.name)
        if setting.name not in ("recipe", "seed") and value <= 0:
            parser.error(f"argument --{setting.name.replace('_', '-')}: {value} is not a positive number")
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden {args.hidden} is not a multiple of twice the --heads {args.heads}")
    if args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k} is more than the --experts {args.experts}")
    for path in args.runs:
        if not path.is_file():
            parser.error(f"there is no file {path}: --json {path} writes it")
    if args.json:  # check before the run, whose results would be lost
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.open("ab").close()
        except OSError as error:
            parser.error(f"--json {args.json} cannot be written: {error.strerror}")
    return args


def main() -> None:
    args = flags()
    if args.plot:
        return plot(args.plot, args.runs)
    ranks = Ranks.join()
    config = Config(**{setting.name: getattr(args, setting.name) for setting in fields(Config)})
    run = train(config, ranks, compiled=args.compile, checkpoint=args.checkpoint)
    if ranks.rank == 0:
        print(
            f"{config.recipe}: validation loss {run['validation'][-1][1]:.3f}, {run['seconds']:.0f} s, "
            f"{run['saved_bytes'] / 2**20:.0f} MiB saved for backward, {run['parameters'] / 1e6:.1f} M parameters"
        )
        if args.json:
            args.json.write_text(json.dumps(run, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
