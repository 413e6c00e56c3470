"""Errors of a command name its options in place of the library's keywords, and leave all else as it is."""

import pytest

from octavo.cli import COMMANDS, load_command
from octavo.cli.option_names import name_options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode='reduce' is not exact; use mode='gather'", "M reduce is not exact; use M gather"),
        ("exact=True needs rows; use exact=False, or more", "--exact needs rows; use no --exact, or more"),
        ("set enable_prefix_caching=False", "set --no-enable-prefix-caching"),
        ("max_num_seqs=256: too few", "--max-num-seqs 256: too few"),
        ("set kv_scales = 'engine', got device=\"cuda:1\"", "set --kv-scales engine, got --device cuda:1"),
        ("raise num_kv_pages or lower max_model_len.", "raise --num-kv-pages or lower --max-model-len."),
        ("dtype must be 'auto'; a dtype of its own", "--dtype must be 'auto'; a dtype of its own"),
        ("load it with recipe='auto'", "load it with --quantization auto"),
        *((text, text) for text in ("llm.kv_scales", "'max_num_seqs'", "/a/max_n/b", "max_position_embeddings=512")),
    ],
)
def test_keywords_become_options(text: str, said: str) -> None:
    keywords = COMMANDS["serve"].keywords
    assert keywords is not None
    assert name_options(text, load_command("serve"), keywords) == said.replace("M ", "--tensor-parallel-mode ")


def test_a_key_of_a_config_becomes_an_option() -> None:
    command = load_command("doctor")
    for text, said in (
        ("run.device must be 'cpu'", "--device must be 'cpu'"),
        ("there is none here; leave run.device out", "there is none here; leave --device out"),
        ("file.toml: run.devices is unknown", "file.toml: run.devices is unknown"),
    ):
        assert name_options(text, command, COMMANDS["doctor"].keywords or {}) == said
