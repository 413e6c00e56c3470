"""The engine section: its short form, what each engine needs, and what exactness rules out."""

from pathlib import Path
from typing import Any

import pytest

from octavo.config import load_config
from octavo.errors import ConfigError
from octavo.numerics import Numerics, get_recipe
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineSection
from octavo.rl.engines.build import build_engine, check_engine
from octavo.weights.checksums import check_updated, engine_name
from tests.rl.conftest import Policy

URL = "http://127.0.0.1:1"


def test_a_name_alone_is_a_section(tmp_path: Path) -> None:
    config = tmp_path / "rl.toml"
    config.write_text('engine = "embedded"\n')
    assert load_config(RLConfig, config).engine == EngineSection()
    config.write_text(f'[engine]\nname = "octavo-server"\nurl = "{URL}"\nbucket_bytes = 4096\n')
    section = load_config(RLConfig, config, ["engine.timeout_s=5"]).engine
    assert (section.name, section.url, section.bucket_bytes, section.timeout_s) == ("octavo-server", URL, 4096, 5.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "vlmm"}, "name must be 'embedded'"),
        ({"name": "vllm"}, r"needs engine\.url"),
        ({"name": "vllm", "url": "127.0.0.1:8000"}, r"needs engine\.url"),
        ({"name": "vllm", "url": URL}, r"engine\.weights_dir"),
        ({"name": "sglang", "url": URL}, r"engine\.weights_dir"),
        ({"name": "sglang", "url": URL, "weights_dir": "w", "running": "wait"}, "no pause that waits"),
        ({"nickname": "vllm"}, "did you mean name|known keys"),
    ],
)
def test_what_an_engine_needs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSection(**fields)


@pytest.mark.parametrize(
    ("name", "numerics", "message"),
    [
        ("vllm", Numerics(exact=True), "exact = true promises the trainer's bits"),
        ("sglang", Numerics(exact=True), "exact = true promises the trainer's bits"),
        ("vllm", Numerics(get_recipe("blockwise"), "fp8", kv_scales="engine"), r"rollout\.kv_scales='engine'"),
        ("octavo-server", Numerics(exact=True), "OCTAVO_ADMIN_KEY"),
    ],
)
def test_what_an_engine_cannot_do(
    blocks: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, numerics: Numerics, message: str
) -> None:
    """Said before it is asked anything, and when it is built."""
    monkeypatch.delenv("OCTAVO_ADMIN_KEY", raising=False)
    section = EngineSection(name=name, url=URL, weights_dir=tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_engine(section, numerics)
    blocks[0].set_numerics(numerics)
    with pytest.raises(ConfigError, match=message):
        build_engine(section, *blocks, max_num_seqs=4, seed=0)
    if name == "octavo-server":
        monkeypatch.setenv("OCTAVO_ADMIN_KEY", "secret")
        engine: Any = build_engine(section, *blocks, max_num_seqs=4, seed=0)
        assert engine.section.admin_key == "secret"


def test_fused_names() -> None:
    layer = "model.layers.3"
    assert engine_name(f"{layer}.self_attn.k_proj.bias") == f"{layer}.self_attn.qkv_proj.bias"
    assert engine_name(f"{layer}.mlp.up_proj.weight") == f"{layer}.mlp.gate_up_proj.weight"
    assert engine_name(f"{layer}.mlp.experts.12.gate_proj.weight") == f"{layer}.mlp.experts.w13_weight"
    assert engine_name(f"{layer}.mlp.experts.12.down_proj.weight") == f"{layer}.mlp.experts.w2_weight"
    assert engine_name(f"{layer}.mlp.gate.weight") == f"{layer}.mlp.gate.weight"


def test_a_fused_tensor_is_judged_only_where_all_its_parts_changed() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    old, new = dict.fromkeys(names, "a"), dict.fromkeys(names, "b")
    held = {"0:model.layers.0.self_attn.qkv_proj.weight": "x"}
    assert check_updated(held, held, old, {**new, names[0]: "a"}) == 0
    assert check_updated(held, dict.fromkeys(held, "y"), old, new) == 1
    with pytest.raises(Exception, match=r"un-updated tensor: 0:model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        check_updated(held, held, old, new)
