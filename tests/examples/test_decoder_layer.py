"""The decoder layer of the examples: its own assertions hold, in fp32, bf16 and FP8."""

from __future__ import annotations

import pytest

from tests.support.examples import example


@pytest.mark.slow
def test_the_layer_is_that_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    example("decoder_layer").main()
    assert capsys.readouterr().out.count("compiled: equal") == 3
