"""slime's flags around FP8 and its correction (miles has the same ones); every other flag is refused by name."""

from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.integrations.config.document import COMMAND_LINE, Document, Setting, parse_value
from octavo.integrations.config.reader import Reader, former_drop_refused
from octavo.integrations.config.verl_routes import put_router_replay
from octavo.numerics.recipe import FORMAT_RECIPES, get_recipe
from octavo.rl.config import RLConfig

_KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "bf16": "bf16", "fp8_e4m3": "fp8"}
KNOWN = (
    "--fp8-format",
    "--fp8-recipe",
    "--bf16",
    "--use-tis",
    "--tis-clip",
    "--tis-clip-low",
    "--sglang-kv-cache-dtype",
    "--use-rollout-routing-replay",
)
REMEDIES = {
    "--fp8-param-gather": "one GPU gathers no parameters; leave it out",
    "--use-routing-replay": "octavo replays the sampler's routes, not the trainer's own; give "
    "--use-rollout-routing-replay",
    "--custom-tis-function-path": "octavo's corrections are chosen by correction.kind and correction.reject",
    "--use-rollout-logprobs": "octavo always scores with the trainer; leave it out",
    "--hf-checkpoint": "give octavo's model.path, and rollout.recipe for a sampler in FP8",
    "--sglang-": "octavo's own engine samples; look for the key in octavo's [rollout]",
    "--transformer-impl": "octavo's own layers compute; leave it out",
    "": "octavo reads slime's FP8 and correction flags alone; look for the key in octavo's own config",
}


def read_slime(
    flags: Sequence[str],
    base: RLConfig | None = None,
    *,
    set_keys: RLConfig | None = None,
    ignore_unsupported: bool = False,
    drop_refused: bool | None = None,
) -> tuple[RLConfig, list[str]]:
    """An octavo config with slime's flags over it; see read_verl. What no flag names is as in octavo's config."""
    ignore_unsupported = former_drop_refused(drop_refused, ignore_unsupported)
    reader = Reader("slime", _parse(flags), base or set_keys or RLConfig(), has_base=True)
    _precision(reader)
    _correction(reader)
    routes = "--use-rollout-routing-replay"
    if reader.is_given(routes):
        put_router_replay(reader, reader.take(routes, bool, False), routes)
    reader.refuse_rest(KNOWN, REMEDIES)
    return reader.finish(ignore_unsupported=ignore_unsupported), reader.notes


def _parse(flags: Sequence[str]) -> Document:
    """`--flag value`, `--flag=value`, and `--switch`, which has the value true."""
    document: Document = {}
    name = ""
    for text in flags:
        if text.startswith("--"):
            name, equals, value = text.partition("=")
            document[name] = Setting(parse_value(value) if equals else True, COMMAND_LINE)
        elif name:
            held = document[name].value
            value = parse_value(text)
            document[name] = Setting(value if held is True else f"{held} {text}", COMMAND_LINE)
        else:
            raise ConfigError(f"{text!r}: slime's arguments begin with a flag, such as --use-tis")
    return document


def _precision(reader: Reader) -> None:
    form, recipe, kv = "--fp8-format", "--fp8-recipe", "--sglang-kv-cache-dtype"
    reader.take("--bf16", bool, True, (True,))
    fp8_format = reader.take(form, str, None, ("e4m3", "hybrid"))
    trained = reader.take(recipe, str, "delayed", FORMAT_RECIPES)
    if reader.is_given(kv):
        reader.put("rollout.kv_cache_dtype", _KV_DTYPES[reader.take(kv, str, "auto", tuple(_KV_DTYPES))], kv)
    if fp8_format is None:
        reader.refuse(recipe, f"it has no effect without {form}; give that too")
        return
    reader.put("trainer.recipe", trained, form, recipe)
    reader.put("trainer.fp8_format", fp8_format, form)
    sampler = reader.base.rollout.recipe or reader.base.trainer.recipe
    is_exact = trained == sampler and get_recipe(trained).is_row_local
    reader.put("rollout.recipe", "" if is_exact else sampler, form)
    reader.put("exact", is_exact, form)


def _correction(reader: Reader) -> None:
    use, cap, low = "--use-tis", "--tis-clip", "--tis-clip-low"
    is_used = reader.take(use, bool, False)
    high, floor = reader.take(cap, float, 2.0), reader.take(low, float, 0.0)
    if not is_used:
        for name in (cap, low):
            reader.refuse(name, f"it has no effect without {use}; give that too")
        return
    reader.put("correction.kind", "token_tis", use)
    reader.put("correction.cap", high, cap, use)
    if floor:
        reader.refuse(low, "octavo's token weights have no lower bound; give 0, or correction.kind = 'icepop' by --set")
