"""Pre-train a small mixture of experts in torchtitan's own trainer, and again with Weft's kernels.

    python examples/torchtitan_moe.py                       # needs torchtitan: pip install -e ".[torchtitan]"
    python examples/torchtitan_moe.py --recipe fp8_block --steps 40

The model is torchtitan's Qwen3 with two layers of eight experts; it predicts the next byte of Python's sources. Both
runs are torchtitan's `Trainer` with its FSDP2, mixed precision, activation checkpointing, optimizer and schedule. They
differ only in the list for `--override.imports` on torchtitan's command line. A table shows both losses.

torchtitan trains on GPUs. Without one, `use_cpu` gives it a CPU.
"""

# ruff: noqa: E402, since the device is chosen between imports
from __future__ import annotations

import argparse
import importlib.util
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

if importlib.util.find_spec("torchtitan") is None:
    raise SystemExit('examples/torchtitan_moe.py needs torchtitan: pip install -e ".[torchtitan]"')


def use_cpu() -> None:
    """Make torchtitan's device the CPU. It looks for a GPU when it is imported, so call this before all its other
    imports. Queries about GPU memory get empty answers."""
    from torchtitan.tools import utils

    memory = SimpleNamespace(total_memory=1, name="CPU")
    answers = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: memory,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**answers)


if not torch.cuda.is_available():
    use_cpu()
if not hasattr(dist, "set_timeout"):
    # torchtitan 0.3.0 shortens timeouts after the first step with a function that torch 2.13 lacks.
    dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

BYTES = 256
WEFT = "weft.integrations.torchtitan"


def overrides(recipe: str | None) -> list[Any]:
    """Return the list for `--override.imports`, where arguments are JSON: 'weft…experts={"recipe": "fp8_block"}'."""
    options = {} if recipe is None else {"recipe": recipe}
    plain = [f"{WEFT}.{name}" for name in ("rms_norm", "rope", "router", "linear_loss")]
    return [*plain, (f"{WEFT}.experts", options), (f"{WEFT}.attention_linear", options)]


# ---- bytes instead of a data set and a tokenizer ------------------------------------------------------------------


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return BYTES


class StandardLibrary(BaseDataLoader):
    """Sequences from the sources of Python's standard library, the same in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, seq_len: int, local_batch_size: int, dp_rank: int, **others: Any
    ) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.shape = (local_batch_size, seq_len)
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batch, length = self.shape
        positions = torch.arange(length).expand(batch, length)
        while True:
            starts = torch.randint(len(self.text) - length, (batch, 1), generator=self.generator)
            tokens = self.text[starts + torch.arange(length + 1)].long()
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


# ---- the run ------------------------------------------------------------------------------------------------------


def configuration(steps: int, folder: str) -> Trainer.Config:
    """Return a configuration like those of torchtitan's registries, with the multiples of 128 that FP8 blocks need."""
    spec = model_registry("debugmodel_moe", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        if not torch.cuda.is_available():
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        moe, routed = layer.moe, layer.moe.routed_experts
        for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            part.num_experts = 8
        moe.router.gate.out_features, routed.inner_experts.hidden_dim = 8, 256
        moe.router.top_k = routed.token_dispatcher.top_k = 2
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=Bytes.Config(),
        dataloader=StandardLibrary.Config(),
        loss=ChunkedLossWrapper.Config(
            num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=2e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(local_batch_size=2, seq_len=128, steps=steps, disable_cuda_graphs=True),
        checkpoint=CheckpointManager.Config(enable=False),
    )


def train(imports: list[Any], steps: int) -> list[float]:
    """Return the losses of a run of torchtitan's trainer on this rank, with these overrides."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29577")
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(steps, folder)
        config.override = OverrideConfig(imports=imports)
        config.debug.seed = 0
        trainer = config.build()
        trainer.metrics_processor.log = lambda step, loss, *others, **metrics: losses.append(float(loss))
        try:
            trainer.train()
        finally:
            trainer.close()
            dist.destroy_process_group()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of the optimizer")
    parser.add_argument("--recipe", help="precision of Weft's products, such as fp8_block (default: bf16)")
    options = parser.parse_args()
    runs, seconds = [], []
    for imports in ([], overrides(options.recipe)):
        begin = time.monotonic()
        runs.append(train(imports, options.steps))
        seconds.append(time.monotonic() - begin)
    table = Table("step", "torchtitan", "with Weft", title="loss in nats per byte")
    for step, losses in enumerate(zip(*runs, strict=True), start=1):
        table.add_row(str(step), *(f"{loss:.5f}" for loss in losses))
    console = Console()
    console.print(table)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print(f"seconds on {device}: {seconds[0]:.0f} and {seconds[1]:.0f}")


if __name__ == "__main__":
    main()
