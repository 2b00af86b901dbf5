"""The example's decoder layer passes its own assertions, in fp32, bf16 and FP8."""

from __future__ import annotations

import pytest

from tests.support.examples import example


@pytest.mark.slow
def test_the_layer_agrees_with_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    example("decoder_layer").main()
    assert capsys.readouterr().out.count("compiled: equal") == 3
