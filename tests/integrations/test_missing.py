"""Integrations without their framework: their error, and that Weft does not need them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, sys

import weft

FRAMEWORKS = ("torchtitan", "megatron", "vllm", "sglang", "jax")
for name in (*FRAMEWORKS, "transformers", "trl"):
    assert not {name, f"weft.integrations.{name}"} & sys.modules.keys(), "imported unasked"
for name in FRAMEWORKS:
    sys.modules[name] = None  # as if it were not installed
    try:
        importlib.import_module(f"weft.integrations.{name}")
    except ImportError as error:
        assert f"pip install 'weft[{name}]'" in str(error), error
        assert f"weft.integrations.{name} supports" in str(error), error
    else:
        raise AssertionError(f"{name} was not needed")
"""


def test_an_integration_without_its_framework_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
