"""Serving with paged caches gives the tokens of transformers' `generate`."""

from __future__ import annotations

import pytest

from tests.support.examples import example

pytest.importorskip("transformers", reason="the model is one of transformers")


@pytest.mark.slow
def test_served_tokens_are_those_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fp8 = example("serve").main()
    assert plain == 1.0
    assert 0.8 < fp8 <= 1.0  # a random model's tokens are almost equally likely
    assert "at once" in capsys.readouterr().out
