"""The `quantization_config` of a config.json, and the files that older tools write beside it, as a `Quantization`.

The rule is that of config.json: accept exactly, or refuse by name. Each method's fields are read in one function; what
only says how the numbers were found (damping, samples, observers) is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cheetah.models.config_json import ConfigError
from cheetah.models.formats.quantized import QuantizationScheme, scheme_of_name
from cheetah.models.quantization.compressed_tensors import read_compressed_tensors
from cheetah.models.quantization.fields import Fields
from cheetah.models.quantization.refused import REFUSED_METHODS
from cheetah.models.quantization.statement import EXPRESSION, LINEAR, Patterns, Quantization, Storage
from cheetah.plan.formats import NV_COLUMNS
from cheetah.printable import shown
from cheetah.untrusted import read_json

LEGACY_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MODELOPT_FILE = "hf_quant_config.json"
SUPPORTED = (
    "supported are gptq, awq, compressed-tensors, fp8, fbgemm_fp8, modelopt (FP8, NVFP4) and mxfp4, and unquantised "
    "weights"
)
HEAD = "lm_head"
LEFT_OUT = "-:"
NO_INPUT_SCALES = "activations are not quantised: scales of inputs are not used"


def quantization_of_folder(folder: Path, values: Mapping[str, Any]) -> Quantization | None:
    """What the folder's files say, `values` being its config.json; None if nothing there is quantised.

    config.json comes first; the older files are read where it says nothing. ConfigError names what is not supported.
    """
    if values.get("quantization_config") is not None:
        return read_quantization(values["quantization_config"], str(folder / "config.json"))
    if (folder / MODELOPT_FILE).is_file():
        stated = read_json(folder / MODELOPT_FILE, error=ConfigError)
        return read_quantization({"quant_method": "modelopt", **stated}, str(folder / MODELOPT_FILE))
    for name, method in LEGACY_FILES.items():
        if (folder / name).is_file():
            stated = read_json(folder / name, error=ConfigError)
            return read_quantization({"quant_method": method, **stated}, str(folder / name))
    return None


def read_quantization(stated: object, place: str) -> Quantization:
    """The object of a `quantization_config`; `place` names it in messages."""
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{place}: quantization_config = {shown(stated)}: must be an object")
    fields = Fields(stated, place)
    method = str(fields.values.get("quant_method", "")).lower()
    if method in REFUSED_METHODS:
        raise fields.error(f"the weights are quantised by {method}: {REFUSED_METHODS[method]}; {SUPPORTED}")
    if method not in _READERS:
        named = shown(fields.values["quant_method"]) if method else "a method that is not named"
        raise fields.error(f"the weights are quantised by {named}: {SUPPORTED}")
    return _READERS[method](fields)


def _gptq(fields: Fields) -> Quantization:
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), fields.text("format", "gptq"))
    for marlin in ("is_marlin_format", "is_bitblas_format"):
        if fields.flag(marlin, False):
            raise fields.error(f"{marlin} is true: weights in a kernel's own order: {SUPPORTED}")
    bits = fields.choice("bits", (4, 8))
    fields.choice("pack_dtype", ("int32",), "int32")
    left_out = _gptq_left_out(fields)
    group = fields.group_size("group_size")
    symmetric = fields.flag("sym", True)
    scheme = QuantizationScheme(f"int{bits}", group, symmetric)
    act_order = fields.flag("desc_act", False) and not fields.flag("static_groups", False) and group is not None
    storage = Storage("gptq", scheme, zero_offset=1 if form == "gptq" else 0, act_order=act_order)
    targets = _gptq_targets(fields)
    ignored = left_out if fields.flag("lm_head", False) else [HEAD, *left_out]
    return _statement(fields, f"{form}, {bits} bits", storage, ignored, targets=targets)


def _gptq_left_out(fields: Fields) -> list[str]:
    """The modules that are not quantised, as expressions: `dynamic` has them by keys with "-:" before. Others say in
    what modules differ: an empty one, as files have for the head and the embeddings, in nothing."""
    stated = fields.values.get("dynamic") or {}
    if not isinstance(stated, Mapping) or any(not key.startswith(LEFT_OUT) and stated[key] != {} for key in stated):
        raise fields.error(
            f"dynamic = {shown(stated)}: modules that differ in their bits are not supported, those that are left out "
            f"({LEFT_OUT!r} before an expression) are"
        )
    return [f"{EXPRESSION}{key.removeprefix(LEFT_OUT)}" for key in stated if key.startswith(LEFT_OUT)]


def _gptq_targets(fields: Fields) -> list[str]:
    """All modules, or those of a layer that the file lists (in the lists in which they were quantised together)."""
    stated = fields.values.get("modules_in_block_to_quantize")
    if stated is None:
        return [LINEAR]
    if not isinstance(stated, list):
        raise fields.error(f"modules_in_block_to_quantize = {shown(stated)}: must be a list of lists of names")
    names = [name for part in stated for name in (part if isinstance(part, list) else [part])]
    if any(not isinstance(name, str) for name in names):
        raise fields.error(f"modules_in_block_to_quantize = {shown(stated)}: must be a list of lists of names")
    return names


def _awq(fields: Fields) -> Quantization:
    form = fields.text("version", fields.text("format", "gemm")).lower()
    if form != "gemm":
        raise fields.error(f"version = {shown(form)} of awq is not supported: supported is 'gemm'")
    if fields.text("backend", "autoawq") == "llm-awq":
        raise fields.error("backend = 'llm-awq' is not supported: supported is 'autoawq' (version gemm)")
    bits = "w_bit" if "w_bit" in fields.values else "bits"
    fields.choice(bits, (4,))
    group = fields.group_size("q_group_size" if "q_group_size" in fields.values else "group_size")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point is false: awq without zero points is not supported")
    storage = Storage("awq", QuantizationScheme("int4", group, symmetric=False))
    return _statement(fields, "awq, gemm", storage, [HEAD, *fields.names("modules_to_not_convert")])


def _fp8(fields: Fields) -> Quantization:
    fields.choice("fmt", ("e4m3",), "e4m3")
    fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    if fields.values.get("scale_fmt") not in (None, "float"):
        raise fields.error(f"scale_fmt = {shown(fields.values['scale_fmt'])} is not supported: scales are numbers")
    if not fields.flag("is_checkpoint_fp8_serialized", True):
        raise fields.error("is_checkpoint_fp8_serialized is false: the weights would be quantised when they are loaded")
    ignored = [HEAD, *fields.names("modules_to_not_convert"), *fields.names("ignored_layers")]
    return _statement(fields, "fp8", float8_storage(fields.block("weight_block_size")), ignored, [NO_INPUT_SCALES])


def _fbgemm(fields: Fields) -> Quantization:
    ignored = [HEAD, *fields.names("modules_to_not_convert")]
    return _statement(fields, "fbgemm_fp8", float8_storage(None), ignored, [NO_INPUT_SCALES])


def _modelopt(fields: Fields) -> Quantization:
    inner = fields.values.get("quantization")
    of = Fields(inner, fields.place) if isinstance(inner, Mapping) else fields
    algorithm = of.text("quant_algo", "none").upper()
    if algorithm not in ("FP8", "NVFP4"):
        raise fields.error(f"quant_algo = {shown(algorithm)} of modelopt is not supported: supported are FP8 and NVFP4")
    ignored, storage = [*of.names("exclude_modules"), *of.names("ignore")], float8_storage(None)
    if algorithm == "NVFP4":
        of.choice("group_size", (NV_COLUMNS,), NV_COLUMNS)
        storage = Storage("nvfp4", scheme_of_name("nvfp4"))
    return _statement(of, f"modelopt, {algorithm}", storage, ignored, [NO_INPUT_SCALES])


def _mxfp4(fields: Fields) -> Quantization:
    """Experts alone are in it, whatever modules the file says are not."""
    storage = Storage("mxfp4", scheme_of_name("mxfp4"))
    return _statement(fields, "mxfp4", storage, [HEAD], targets=["mlp.experts"])


def float8_storage(block: tuple[int, int] | None) -> Storage:
    """e4m3 with a scale a tensor or row, or one for each block [rows, columns]."""
    if block is None:
        return Storage("float8", QuantizationScheme("fp8", scales="f32"))
    return Storage("float8", QuantizationScheme("fp8", block[1], scales="f32"), block_rows=block[0])


def _statement(
    fields: Fields,
    method: str,
    storage: Storage,
    ignored: list[str],
    notes: list[str] | None = None,
    targets: list[str] | None = None,
) -> Quantization:
    place = fields.place
    lines = tuple(f"{place}: {line}" for line in notes or [])
    groups = ((Patterns(targets or [LINEAR], place), storage),)
    return Quantization(place, method, groups, Patterns(ignored, place), lines)


_READERS: dict[str, Callable[[Fields], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}
