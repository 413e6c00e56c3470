"""Which versions of other frameworks octavo was tested with: what their modules ask first, and octavo doctor shows."""

import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

from octavo import env
from octavo.errors import BackendError


class Versions(NamedTuple):
    """Versions of a package that a row of docs/ecosystem.md was tested with: from the oldest up to the newest."""

    oldest: str
    newest: str


# row -> package -> versions; the newest are those of ecosystem/ROW.txt
ROWS: dict[str, dict[str, Versions]] = {
    "huggingface": {
        "transformers": Versions("5.20.2", "5.24.0"),
        "accelerate": Versions("1.15.0", "1.15.0"),
        "trl": Versions("1.16.0", "1.16.0"),
    },
    "peft": {"peft": Versions("0.21.2", "0.21.2")},
    "deepspeed": {"deepspeed": Versions("0.19.8", "0.19.8")},
    "colossalai": {"colossalai": Versions("0.5.0", "0.5.0")},
    "megatron": {"megatron-core": Versions("0.16.1", "0.16.1")},
    "lightning": {"lightning": Versions("2.6.6", "2.6.6")},
    "torchtitan": {"torchtitan": Versions("0.3.0", "0.3.0")},
    "nemo": {"nemo-automodel": Versions("0.7.0", "0.7.0")},
    "sinks": {"wandb": Versions("0.31.0", "0.31.0"), "mlflow": Versions("3.17.2", "3.17.2")},
}


# other libraries that make FP8 linears
OTHER_BACKENDS = ("transformer_engine", "torchao", "bitsandbytes")
_STATUS: dict[str, Literal["ok", "note", "fail"]] = {"ok": "ok", "new": "note", "missing": "note", "old": "fail"}


def installed_version(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_version(package: str, tested: Versions) -> tuple[str, str]:
    """How what is installed compares with what was tested.

    Returns:
        ("ok", "old", "new" or "missing", one line that says so and what to do).
    """
    found = installed_version(package)
    wanted = f"{package} {tested.newest}" if tested.oldest == tested.newest else f"{package} {' to '.join(tested)}"
    if found is None:
        return "missing", f"{package} is not installed; octavo was tested with {wanted}: pip install {package}"
    if _numbers(found) < _numbers(tested.oldest):
        return "old", f"{package} {found} is too old; octavo was tested with {wanted}: pip install -U {package}"
    if _numbers(found) > _numbers(tested.newest):
        return "new", f"{package} {found} is newer than what octavo was tested with, {wanted}"
    return "ok", f"{package} {found}"


def require(row: str, package: str) -> None:
    """Check a package when its row's module is imported; a version newer than the tested ones gets a warning.

    Raises:
        BackendError: it is not installed, or too old.
    """
    status, text = describe_version(package, ROWS[row][package])
    if status in ("missing", "old"):
        raise BackendError(f"octavo.integrations.{row}: {text}")
    if status == "new":
        warnings.warn(f"octavo.integrations.{row}: {text}", stacklevel=3)


def accelerates_fp8() -> str:
    """What switches accelerate's own FP8 on: a variable of `accelerate launch`, or its configuration file; else ""."""
    if env.accelerate_precision() == "fp8":
        return "ACCELERATE_MIXED_PRECISION=fp8"
    path = env.huggingface_home() / "accelerate" / "default_config.yaml"
    is_on = path.is_file() and re.search(r"^mixed_precision:\s*['\"]?fp8", path.read_text(), re.MULTILINE)
    return f"mixed_precision: fp8 in {path}" if is_on else ""


def check_ecosystem() -> list[tuple[str, Literal["ok", "note", "fail"], str]]:
    """What octavo doctor --ecosystem shows: (row or library, status, text)."""
    found = [
        (row, _STATUS[status], text)
        for row, packages in ROWS.items()
        for status, text in (describe_version(package, tested) for package, tested in packages.items())
    ]
    for package in OTHER_BACKENDS:
        if (other := installed_version(package)) is not None:
            text = f"{other} is installed too; a model that has its layers is not converted, take one of the two"
            found.append((package, "note", text))
    if where := accelerates_fp8():
        found.append(
            ("accelerate", "fail", f"{where} converts linears as octavo does; set mixed_precision to bf16 or no")
        )
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """The release's numbers: 5.24.0rc1 is (5, 24, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
