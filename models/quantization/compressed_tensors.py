"""The `quantization_config` of compressed-tensors: groups of targets, each with a scheme or the name of one."""

from __future__ import annotations

from typing import Any

from cheetah.models.formats.quantized import QuantizationScheme, scheme_of_name
from cheetah.models.quantization.fields import Fields
from cheetah.models.quantization.statement import EXPRESSION, LINEAR, Patterns, Quantization, Storage
from cheetah.plan.formats import NV_COLUMNS
from cheetah.printable import shown

PACKED, FLOAT, MARLIN24 = "pack-quantized", "float-quantized", "marlin-24"
NVFP4 = "nvfp4-pack-quantized"
OUTLIERS = f"{PACKED}+outliers"
"""Our own: beside packed codes single weights as they are, see `cheetah.runtime.checkpoint.outliers`."""
DENSE = "dense"
"""No weight is quantised, or none is sparse: the statement is of keys and values alone, or of the other."""
TWO_OF_FOUR_MASK, ANY_MASK = "sparse-24-bitmask", "sparse-bitmask"
"""Weights that are not zero, with a bit for each weight: see `cheetah.runtime.checkpoint.masked`."""
ACT_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Whether an `actorder` leaves groups of columns that are no neighbours (compressed_tensors, quant_args.py)."""
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PRESETS: dict[str, dict[str, Any]] = {
    "W4A16": _INT4,
    "W4A16_ASYM": {**_INT4, "symmetric": False},
    **dict.fromkeys(("NVFP4", "NVFP4A16"), {"num_bits": 4, "type": "float", "symmetric": True}),
    "FP8": {**_FP8, "strategy": "tensor"},
    "FP8_DYNAMIC": {**_FP8, "strategy": "channel"},
    "FP8_BLOCK": {**_FP8, "strategy": "block", "block_structure": [128, 128]},
}
"""Schemes that a group may name in place of stating one, weights only (compressed_tensors, quant_scheme.py). W8A16 is
not among them: it means a scale a row in older versions, groups of 128 in newer ones."""


def read_compressed_tensors(fields: Fields) -> Quantization:
    """Its object; `fields.place` names it in messages."""
    has_scheme = "kv_cache_scheme" in fields.values
    sparse, layout = _sparse(fields)
    is_bare = has_scheme or layout != DENSE
    stated = fields.values.get("config_groups", {} if is_bare else None)
    forms = (DENSE, PACKED, FLOAT) if is_bare and stated == {} else (PACKED, FLOAT, MARLIN24, OUTLIERS, NVFP4)
    form = fields.choice("format", forms, DENSE if layout != DENSE and stated == {} else None)
    fields.choice("quantization_status", ("compressed",), "compressed")
    if transforms := fields.values.get("transform_config"):
        raise fields.error(f"transform_config = {shown(transforms)}: transformed activations are not supported")
    if not isinstance(stated, dict) or not (stated or is_bare):
        raise fields.error("config_groups is missing or empty: it must say how which modules are quantised")
    notes: list[str] = []
    groups = [_group(fields.inner("config_groups", stated), name, form, notes) for name in stated]
    groups.sort(key=lambda group: _vagueness(group[0]))
    if has_scheme:
        notes.append("it was made for keys and values in 8 bits; --kv-dtype says how they are kept")
    ignored = Patterns(fields.names("ignore"), fields.place)
    if form == MARLIN24:
        sparse = Patterns([LINEAR], fields.place), ignored
    return Quantization(
        fields.place,
        f"compressed-tensors, {form if layout == DENSE else layout if form == DENSE else f'{form}, {layout}'}",
        tuple((Patterns(targets, fields.place), storage) for targets, storage in groups),
        ignored,
        tuple(f"{fields.place}: {note}" for note in dict.fromkeys(notes)),
        sparse,
    )


def _sparse(fields: Fields) -> tuple[tuple[Patterns, Patterns] | None, str]:
    """The modules of whose weights two of four are stored, with those left out, and how sparse weights lie in files."""
    inner = fields.inner("sparsity_config", fields.values.get("sparsity_config", {}))
    layout = inner.choice("format", (DENSE, TWO_OF_FOUR_MASK, ANY_MASK), DENSE)
    if layout != TWO_OF_FOUR_MASK:
        return None, layout
    targets = inner.names("targets") or [LINEAR]
    return (Patterns(targets, fields.place), Patterns(inner.names("ignore"), fields.place)), layout


def _vagueness(targets: list[str]) -> int:
    """A name says more than an expression, and that more than a class: what says most is asked first."""
    return max(2 if target == LINEAR else 1 if target.startswith(EXPRESSION) else 0 for target in targets or [LINEAR])


def _group(groups: Fields, name: str, form: str, notes: list[str]) -> tuple[list[str], Storage]:
    if isinstance(groups.values[name], list):  # a preset's name with its targets
        if name not in PRESETS:
            raise groups.error(f"{shown(name)} is not a scheme that is supported: supported: {', '.join(PRESETS)}")
        weights = Fields(PRESETS[name], groups.place)
        return groups.names(name), _storage(weights, form)
    group = groups.inner(name, groups.values.get(name))
    if "weights" not in group.values:
        raise group.error("weights is missing: groups that quantise activations alone are not supported")
    if group.text("format", form) != form:
        raise group.error(f"format = {shown(group.values['format'])} differs from the checkpoint's, {form!r}")
    if "output_activations" in group.values:
        raise group.error("output_activations: quantised outputs are not supported")
    _check_inputs(group, notes)
    return group.names("targets"), _storage(group.inner("weights", group.values["weights"]), form)


def _check_inputs(group: Fields, notes: list[str]) -> None:
    """Inputs that were to be rounded to floating point of 8 or 4 bits are left as they are, which is nearer to the
    original."""
    if "input_activations" in group.values:
        inputs = group.inner("input_activations", group.values["input_activations"])
        if inputs.text("type", "int") != "float" or inputs.values.get("num_bits") not in (4, 8):
            raise group.error("input_activations: integer activations (W8A8, W4A8) are not supported; W8A16 is")
        notes.append("activations are not quantised: scales of inputs are not used")


def _storage(weights: Fields, form: str) -> Storage:
    if weights.flag("dynamic", False):
        raise weights.error("dynamic is true: the scales of weights must be stored")
    if form == MARLIN24:
        return _marlin24_storage(weights)
    if form == OUTLIERS:
        return _outlier_storage(weights)
    if form == NVFP4:
        return _nvfp4_storage(weights)
    return _float_storage(weights) if form == FLOAT else _integer_storage(weights)


def _nvfp4_storage(weights: Fields) -> Storage:
    weights.choice("type", ("float",))
    weights.choice("num_bits", (4,))
    weights.choice("symmetric", (True,), True)
    weights.choice("strategy", ("tensor_group",), "tensor_group")
    weights.choice("group_size", (NV_COLUMNS,), NV_COLUMNS)
    return Storage("nvfp4-packed", scheme_of_name("nvfp4"))


def _integer_storage(weights: Fields) -> Storage:
    weights.choice("type", ("int",), "int")
    kind = f"int{weights.choice('num_bits', (4, 8))}"
    strategy = weights.choice("strategy", ("group", "channel"), "group" if "group_size" in weights.values else None)
    group = weights.group_size("group_size") if strategy == "group" else None
    scheme = QuantizationScheme(kind, group, weights.flag("symmetric", True))
    return Storage("packed", scheme, act_order=_is_ordered(weights) and group is not None)


def _marlin24_storage(weights: Fields) -> Storage:
    storage = _integer_storage(weights)
    weights.choice("symmetric", (True,), True)
    if storage.scheme.group_columns not in (None, 128):
        raise weights.error(
            f"group_size = {storage.scheme.group_columns} of {MARLIN24} is not supported: supported: 128"
        )
    return Storage("marlin24", storage.scheme)


def _outlier_storage(weights: Fields) -> Storage:
    storage = _integer_storage(weights)
    if storage.act_order:
        raise weights.error(f"actorder of {OUTLIERS} is not supported: leave it out")
    return Storage("outliers", storage.scheme)


def _is_ordered(weights: Fields) -> bool:
    """Of its names "weight" is the older one of "static": groups are chosen in the columns' own order then."""
    stated = weights.values.get("actorder")
    if type(stated) is bool:  # older files say whether
        return stated
    name = weights.text("actorder", "static").lower()
    if name not in ACT_ORDERS:
        raise weights.error(f"actorder = {shown(stated)} is not supported: supported: {', '.join(ACT_ORDERS)}, or none")
    return ACT_ORDERS[name]


def _float_storage(weights: Fields) -> Storage:
    weights.choice("type", ("float",))
    weights.choice("num_bits", (8,))
    weights.choice("symmetric", (True,), True)
    if weights.choice("strategy", ("tensor", "channel", "block"), "tensor") != "block":
        return Storage("float8", QuantizationScheme("fp8", scales="f32"))
    block = weights.block("block_structure")
    if block is None:
        raise weights.error("block_structure is missing: write [rows, columns] of a block")
    return Storage("float8", QuantizationScheme("fp8", block[1], scales="f32"), block_rows=block[0])
