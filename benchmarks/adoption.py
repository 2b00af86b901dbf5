"""Measure memory and time of a training step of a transformers model on this CPU, with and without Weft.

    python benchmarks/adoption.py

The model is a small Qwen3 with the vocabulary of a large one, 151,936 words, so that its logits are, as in practice,
the largest tensor of the step. Each variant runs in its own process. Memory is the peak resident size during the second
step minus that before it. Times are those of kernels run through Loom and say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from memory import extra_memory
from rich.console import Console
from rich.table import Table

WAYS = ("unchanged", "weft: loss", "weft: all")


def measure(way: str, tokens: int) -> dict[str, float]:
    import torch
    import transformers

    import weft.integrations

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config).train()
    if way == "weft: loss":
        weft.integrations.apply(model, norm=False, mlp=False)
    elif way == "weft: all":
        weft.integrations.apply(model)
    ids = torch.randint(config.vocab_size, (1, tokens))

    def step() -> float:
        model.zero_grad(set_to_none=False)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    loss = step()  # compiles, and allocates the gradients
    begin = time.perf_counter()
    extra = extra_memory(step)
    return {"MiB": extra / 2**20, "seconds": time.perf_counter() - begin, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and time of a training step, with Weft and without")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process, and print JSON")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.tokens)))
        return
    table = Table(title=f"a training step of {options.tokens} tokens, vocabulary 151,936, fp32, measured")
    for column in ("", "memory above the model, MiB", "seconds (Loom)", "loss"):
        table.add_column(column, justify="left" if not column else "right")
    console = Console()
    for way in WAYS:
        with console.status(way):
            command = [sys.executable, __file__, "--way", way, "--tokens", str(options.tokens)]
            # Return freed memory to the system at once, so that the resident size is what is in use.
            env = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        row = json.loads(done.stdout.splitlines()[-1])
        table.add_row(way, f"{row['MiB']:,.0f}", f"{row['seconds']:.1f}", f"{row['loss']:.5f}")
    console.print(table)


if __name__ == "__main__":
    main()
