"""Fine-tune a small Qwen3 with TRL by SFT, DPO and GRPO, once with TRL's own log-probabilities and once with Weft's.

    python examples/finetune_trl.py --steps 3               # needs TRL: pip install -e ".[trl]"

The model has random weights and a vocabulary of a few hundred words; nothing is downloaded. Both runs start from the
same weights, and must give the same logs and parameters.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "1")

import torch
from torch import Tensor

try:
    import transformers
    import trl
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models, pre_tokenizers
except ModuleNotFoundError:
    raise SystemExit('examples/finetune_trl.py needs TRL: pip install -e ".[trl]"') from None

import weft.integrations.trl

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(300))]
TEXTS = [" ".join(f"w{(i * 37 + j * j * 11) % 300}" for j in range(24)) for i in range(8)]
PROMPTS = [" ".join(text.split()[:8]) for text in TEXTS]
ANSWERS = [" " + " ".join(text.split()[8:]) for text in TEXTS]


def make_tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_model(directory: Path) -> Any:
    """Return a model, also saved to a directory, from which DPO and GRPO load their reference model."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(WORDS),
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    model.config._name_or_path = str(directory)
    return model


def different_words(completions: list[str], **_: Any) -> list[float]:
    """Return GRPO's reward: for many different words, and a little for which words they are."""
    return [float(len(set(text.split()))) + 0.1 * (sum(map(ord, text)) % 7) for text in completions]


def make_trainer(method: str, directory: Path, steps: int) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
    }
    common = {"model": make_model(directory / "model"), "processing_class": make_tokenizer()}
    if method == "sft":
        data = Dataset.from_dict({"text": TEXTS})
        return trl.SFTTrainer(
            args=trl.SFTConfig(**options, gradient_checkpointing=True), train_dataset=data, **common
        )
    if method == "dpo":
        worse = [" " + " ".join(reversed(answer.split())) for answer in ANSWERS]
        data = Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": worse})
        return trl.DPOTrainer(args=trl.DPOConfig(**options, use_weighting=True), train_dataset=data, **common)
    args = trl.GRPOConfig(
        **options, num_generations=4, max_completion_length=8, beta=0.04, temperature=0.9, entropy_coef=0.01
    )
    data = Dataset.from_dict({"prompt": PROMPTS})
    return trl.GRPOTrainer(args=args, train_dataset=data, reward_funcs=different_words, **common)


class Run(NamedTuple):
    logs: list[dict[str, float]]  # of each step
    parameters: Tensor  # of the trained model
    seconds: float


def train(method: str, steps: int, with_weft: bool) -> Run:
    (weft.integrations.trl.enable if with_weft else weft.integrations.trl.disable)()
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(method, Path(directory), steps)
        trainer.remove_callback(transformers.PrinterCallback)
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(logs, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for method in ("sft", "dpo", "grpo"):
        trl_run, weft_run = (train(method, steps, with_weft) for with_weft in (False, True))
        print(f"\n{method:5} {'loss':>22} {'gradient norm':>22} {'entropy':>22}   (TRL, Weft)")
        for step, (a, b) in enumerate(zip(trl_run.logs, weft_run.logs, strict=True)):
            pairs = (f"{a[name]:11.6f}{b[name]:11.6f}" for name in ("loss", "grad_norm", "entropy"))
            print(f"{step:5}", *pairs)
        difference = (trl_run.parameters - weft_run.parameters).norm() / trl_run.parameters.norm()
        print(
            f"parameters differ by {difference:.1e} (relative); {trl_run.seconds:.1f} s and {weft_run.seconds:.1f} s"
        )
        assert difference < 1e-5
    weft.integrations.trl.disable()


if __name__ == "__main__":
    main()
