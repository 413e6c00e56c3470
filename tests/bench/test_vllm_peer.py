"""The peer's benchmark asks for the peer; it runs on GPUs alone."""

import importlib.util

import pytest

from bench.serve import vllm_peer


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_is_named_where_it_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_peer.main(["--tensor-parallel-size", "2"])
    assert "pip install vllm==0.26.0" in capsys.readouterr().err
