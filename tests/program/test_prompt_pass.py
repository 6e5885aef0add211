"""A pass over a prompt against the float32 reference: the keys and values of all layers that it leaves in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, EmulatorError
from cheetah.generate import choose_plan, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.models.dense.pass_sizes import PassSizes
from cheetah.models.dense.reference import Reference, rms_norm
from cheetah.models.dense.weights import FINAL_NORM
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.registry import in_format, preset
from cheetah.models.rounding import round_to_e4m3, widen
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import PassPlan, default_pass_plan, short_pass_plans
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.engine.launches import Part
from cheetah.tools.rig import GivenWeights, Rig, Session
from tests.planted_text import planted
from tests.program.joined import chosen, joined
from tests.program.kinds import KINDS
from tests.program.layer_kinds import behind, sandwich
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import emulated_gpu, kept, model, random_weights, relative_error, token_ids
from tests.tiers import tiered

pytestmark = pytest.mark.compiler

TOLERANCE = 0.035
"""The largest relative error of a head of a key or value (seen: 0.023; rounding the reference to bf16 where products
begin gives 0.030 by itself)."""
STATES_TOLERANCE = 0.055
"""The same of a whole hidden state (seen: 0.043; rounding the reference to bf16 gives 0.038 by itself)."""
E4M3_TOLERANCE = 0.2
"""The same where keys and values are e4m3: a number that is rounded to the next code differs by up to 1/8, and later
layers see that (seen: 0.16; without any rounding of them the reference is 0.115 away from itself)."""
SMALL = model(layers=3)
PASS = PassPlan(tokens=160, tile_tokens=16, warpgroups=1, stages=3, key_tile=16)
NARROW = model(hidden=112, ffn=320, heads=4)
"""On two or three blocks o and down have M-tiles of 8 rows, the other matrices of 16."""
WINDOWED = MistralConfig(48, 40, 2, 2, 1, 64, 50, max_position_embeddings=256, sliding_window=21)
GROUPS_TOLERANCE = 0.045
"""The same where weights are rounded too, because their groups have scales (seen: 0.038)."""
KV_SCALE = np.float32(0.03)
"""Of e4m3 codes, times powers of two, of which rounding knows nothing."""


@cache
def weights_of(config: ModelConfig) -> Any:
    return QuantizedWeights(config, scales="bf16") if config.weight_formats else random_weights(config)


class PassRig(Rig):
    """A pass' kernel compiled for the emulator, with a model's weights. bug: planted in its text; bugs: of several,
    each the one that `tests.program.joined.chosen` chooses."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int = 2,
        pass_plan: PassPlan = PASS,
        bug: tuple[str, str] | None = None,
        bugs: Sequence[tuple[str, str]] = (),
        sanitize: bool = False,
        watched: bool = False,
        weights: Any = None,
        **plan: Any,
    ) -> None:
        fields = {"consumer_warps": 2, "max_context": 192, "stage_bytes": 4096, "page_size": 5, "batch": 3, **plan}
        gpu = gpu_named(emulated_gpu(blocks))
        self.sizes = PassSizes(config, gpu, choose_plan(config, gpu, **fields), pass_plan)
        made = kept(generate_pass)(config, gpu, self.sizes.plan, pass_plan)
        if bug is not None:
            made = made.with_text(planted(made.text, *bug))
        if bugs:
            made = joined(made, [made.with_text(planted(made.text, *one)) for one in bugs])
        weights = weights or weights_of(config)
        powers = np.random.default_rng(4).integers(-2, 3, (config.layers, 2, config.kv_heads))
        scales = np.asarray(KV_SCALE * 2.0**powers, np.float32)
        given = GivenWeights(config, weights.tensor, getattr(weights, "rows", None), scales)
        super().__init__(given, made, sanitize=sanitize, watched=watched)


class PassSession(Session):
    """Passes over sequences, from an empty cache."""

    def __init__(self, rig: PassRig, seed: int = 0) -> None:
        super().__init__(rig, EmulatorDevice(), np.random.default_rng(seed).permutation(rig.plan.kv_pages))
        self.passes.window = None  # keys that a window has left behind stay, to be looked at
        self.caches = [self.sequence() for _ in range(rig.plan.batch)]

    def read(
        self, parts: dict[int, list[int]], scheduler: str = "round_robin", seed: int = 0, wanted: Sequence[int] = ()
    ) -> None:
        """One launch over the next tokens of some sequences. wanted: columns whose hidden states are left, in place of
        those that the launcher asks for."""
        self.device._schedule = {"scheduler": scheduler, "seed": seed}
        want = int(len(wanted) > 0)
        flight = self.passes.prepare(
            [Part(self.caches[number], ids, len(ids), wanted=want) for number, ids in parts.items()]
        )
        if wanted:
            self.buffers["wanted"].upload(np.array(wanted, np.int32))
            flight.arguments["wanted_count"] = len(wanted)
        self.passes.start(flight)
        self.passes.finish(flight)

    def states(self, count: int) -> np.ndarray:
        """float32 [count, hidden]: of the columns that were wanted last."""
        shape = (count, self.config.padded_hidden)
        return widen(self.buffers["hidden_states"].download(np.uint16, shape)[:, : self.config.hidden_size])

    def keys_and_values(self, sequence: int = 0) -> np.ndarray:
        """float32 [layers, keys or values, kv_heads, tokens, head_dim]."""
        return self.numbers_of(self.cached_of(self.caches[sequence]))


@cache
def reference_cache(config: ModelConfig, count: int) -> np.ndarray:
    reference = Reference(config, weights_of(config).tensor)
    reference.forward(token_ids(count, config.vocab_size))
    return np.stack([reference.keys[:, :, :count], reference.values[:, :, :count]], axis=1)


@cache
def reference_states(config: ModelConfig, count: int) -> np.ndarray:
    """float32 [count, hidden]: the last norm's output."""
    reference = Reference(config, weights_of(config).tensor)
    return np.stack([reference.hidden_state(token) for token in token_ids(count, config.vocab_size)])


def normalised(config: ModelConfig, states: np.ndarray) -> np.ndarray:
    weight = widen(weights_of(config).tensor(FINAL_NORM)) + config.norms.plus_one
    return np.stack([rms_norm(state, weight, config.rms_norm_eps) for state in states])


@cache
def rig_of(config: ModelConfig, **options: Any) -> PassRig:
    return PassRig(config, **options)


def read(rig: PassRig, parts: tuple[int, ...], scheduler: str = "round_robin", seed: int = 0) -> PassSession:
    """A session that has read a prompt in passes of so many tokens."""
    ids = token_ids(sum(parts), rig.config.vocab_size)
    session = PassSession(rig, seed)
    for count in parts:
        length = session.caches[0].length
        session.read({0: ids[length : length + count]}, scheduler, seed)
    return session


def error(session: PassSession) -> float:
    return relative_error(session.keys_and_values(), reference_cache(session.rig.config, session.caches[0].length))


@pytest.mark.slow
def test_a_pass_leaves_the_references_keys_and_values() -> None:
    bits = set()
    for scheduler in SCHEDULERS:
        session = read(rig_of(SMALL), (53,), scheduler, seed=1)
        assert error(session) < TOLERANCE
        bits.add(session.keys_and_values().tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("parts", [(1,), (16, 1), (64, 64, 33), (7, 40)], ids=str)
@pytest.mark.slow
def test_passes_go_on_where_the_cache_ends(parts: tuple[int, ...]) -> None:
    assert error(read(rig_of(SMALL), parts)) < TOLERANCE


CUT = {
    "lower tiles, some in parts": (model(hidden=256, ffn=512), 13, 64, [(3, 2), (4, 1), (3, 1), (3, 2)]),
    "for two tiles of tokens": (model(hidden=256, ffn=512), 23, 32, [(4, 2), (4, 1), (4, 1), (4, 2)]),
    "narrow M-tiles": (
        model(hidden=240, ffn=768, heads=4, residual_multiplier=0.4),
        13,
        64,
        [(4, 2), (3, 2), (4, 1), (4, 3)],
    ),
}
"""Model, blocks, tokens of a tile, and M-tiles and parts of each product."""


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered(CUT, ["for two tiles of tokens", "lower tiles, some in parts"]))
def test_products_of_few_tokens_are_cut(case: str) -> None:
    """So that all blocks have work; the bits are others, but still the same under every schedule."""
    config, blocks, tile_tokens, cuts = CUT[case]
    few = PassPlan(tokens=64, tile_tokens=tile_tokens, warpgroups=1, stages=3, cut_tokens=64, key_tile=32)
    rig = rig_of(config, blocks=blocks, pass_plan=few)
    sizes = rig.sizes
    assert [(sizes.height(one) or few.tile_m_tiles, sizes.parts(one)) for one in sizes.table.products] == cuts
    sessions = [read(rig, (13, 40), scheduler) for scheduler in SCHEDULERS]
    assert error(sessions[0]) < TOLERANCE
    assert len({session.keys_and_values().tobytes() for session in sessions}) == 1


@pytest.mark.parametrize(
    ("model", "few", "more"),
    [
        ("llama-3.1-8b", [(6, 2), (8, 4), (7, 1), (8, 4)], [(8, 1), (8, 2), (8, 1), (8, 2)]),
        ("qwen3-8b", [(6, 2), (8, 4), (6, 1), (8, 4)], [(8, 1), (8, 2), (8, 1), (8, 2)]),
        ("llama-3.1-70b", [(5, 1), (8, 2), (7, 1), (8, 2)], [(8, 1)] * 4),
    ],
)
def test_cuts_of_presets(model: str, few: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    """M-tiles and parts of each product: on 132 blocks, for 128 and for 512 tokens."""
    config, gpu = preset(model), gpu_named("h200")
    for pass_plan, wanted in zip(short_pass_plans(gpu, config.shape), (few, more), strict=True):
        sizes = PassSizes(config, gpu, choose_plan(config, gpu), pass_plan)
        found = [(sizes.height(one) or 8, sizes.parts(one)) for one in sizes.table.products]
        assert found == wanted


FAMILIES = {
    "groups, heads of 128, pages of 16": (
        model(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=128),
        {"page_size": 16, "stage_bytes": 8192},
    ),
    "heads of 256": (
        model(hidden=48, ffn=40, heads=4, kv_heads=2, head_dim=256),
        {"stage_bytes": 16384, "pass_plan": replace(PASS, warpgroups=2)},
    ),
    "biases": (Qwen2Config(48, 40, 2, 2, 1, 64, 50, max_position_embeddings=256), {}),
    "norms of heads": (Qwen3Config(48, 40, 2, 2, 1, 64, 50, max_position_embeddings=256), {}),
    "a sliding window": (WINDOWED, {}),
    "layers of several kinds, norms over all heads": (KINDS, {}),
    "norms of heads of 256": (
        Qwen3Config(48, 40, 2, 3, 1, 256, 50, max_position_embeddings=256),
        {"stage_bytes": 16384, "pass_plan": replace(PASS, warpgroups=2)},
    ),
    "narrow M-tiles": (NARROW, {}),
    "norms on both sides, multipliers": (sandwich(), {}),
    "norms behind alone": (behind(), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    tiered(
        FAMILIES,
        [
            "norms behind alone",
            "biases",
            "norms of heads",
            "norms of heads of 256",
            "narrow M-tiles",
            "a sliding window",
        ],
    ),
)
def test_families(family: str) -> None:
    config, plan = FAMILIES[family]
    rig = rig_of(config, blocks=3, **plan)
    assert rig.sizes.matrices.named("o").is_narrow == family.startswith("narrow")
    session = read(rig, (30, 41), "random", 2)
    assert error(session) < TOLERANCE
    session.caches[0].length = 30
    session.read({0: token_ids(71, config.vocab_size)[30:]}, "random", 3, wanted=range(41))
    assert error(session) < TOLERANCE
    states = normalised(config, session.states(41))
    assert relative_error(states, reference_states(config, 71)[30:]) < STATES_TOLERANCE


@pytest.mark.slow
def test_hidden_states_of_any_columns_of_several_sequences() -> None:
    """The columns that are named, in their order; the same bits whatever else is read and wanted."""
    rig, ids = rig_of(SMALL), token_ids(61, SMALL.vocab_size)
    wanted = reference_states(SMALL, 61)
    alone = read(rig, (40,))
    alone.read({0: ids[40:]}, wanted=[20])
    assert relative_error(normalised(SMALL, alone.states(1)), wanted[60:]) < STATES_TOLERANCE
    together = PassSession(rig, seed=1)
    together.read({1: ids[:9], 0: ids[:30]}, "random", 1, wanted=[8, 16 + 29])
    assert relative_error(normalised(SMALL, together.states(2)), wanted[[8, 29]]) < STATES_TOLERANCE
    together.read({1: ids[9:20]}, "priority", 1)
    together.read({1: ids[20:33], 0: ids[30:]}, "random", 2, wanted=[46, 12, 16, 46])
    assert relative_error(normalised(SMALL, together.states(4)), wanted[[60, 32, 30, 60]]) < STATES_TOLERANCE
    assert together.states(4)[0].tobytes() == together.states(4)[3].tobytes() == alone.states(1).tobytes()
    assert alone.keys_and_values().tobytes() == together.keys_and_values().tobytes()


CUTS = ((61,), (16, 1, 30, 14), (48, 13))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "blocks"), [(SMALL, 2), (KINDS, 3)], ids=["all keys", "windows in some layers"])
def test_neither_cuts_nor_company_change_a_bit(config: ModelConfig, blocks: int) -> None:
    """However a prompt is cut into passes, and whatever else these read: other prompts, or other parts of them."""
    rig = rig_of(config, **({"blocks": blocks} if blocks != 2 else {}))
    ids, bits = token_ids(61, config.vocab_size), set()
    for number, cuts in enumerate(CUTS):
        session = PassSession(rig, seed=number)
        for count in cuts:
            length = session.caches[0].length
            part, other = ids[length : length + count], token_ids(11 * number + 7, config.vocab_size, number)
            session.read({2: other, 0: part, 1: ids[:9]} if number % 2 else {0: part, 1: other}, "random", number)
        assert relative_error(session.keys_and_values(0), reference_cache(config, len(ids))) < TOLERANCE
        bits.add(session.keys_and_values(0).tobytes())
    assert len(bits) == 1


FORMATS = (
    "int4-g128",
    "int4",
    "int4-g32-asym",
    "int8-asym",
    "int8-g64",
    "fp8",
    "fp8-block128",
    "nvfp4",
    "2of4",
    "2of4-int4-g64",
    "2of4-fp8",
    "2of4+list12",
    "blocks-2of4",
    "blocks-1of4",
    "blocks-1024of1024",
    "int4-g64+list5",
)


IN_MAKE_TEST = ("nvfp4", "2of4-int4-g64")


@pytest.mark.slow
@pytest.mark.parametrize("format", tiered(FORMATS, [name for name in FORMATS if name not in IN_MAKE_TEST]))
def test_quantised_and_sparse_weights(format: str) -> None:
    """As many columns as leave half a K-tile, and most of one, over."""
    formats = tuple((name, format) for name in ("qkv", "o", "gate_up", "down"))
    stage_bytes = 32768 if "list" in format or "blocks" in format else 8192
    rig = rig_of(model(hidden=144, ffn=200, weight_formats=formats), stage_bytes=stage_bytes)
    has_groups = getattr(rig.sizes.format, "group_columns", None) is not None
    assert error(read(rig, (30, 11), "random", 1)) < (GROUPS_TOLERANCE if has_groups else TOLERANCE)


@pytest.mark.slow
def test_columns_in_an_order_of_their_own() -> None:
    formats = tuple((name, "int4-g32-asym") for name in ("qkv", "o", "gate_up", "down"))
    rig = rig_of(model(hidden=144, ffn=200, weight_formats=formats, act_order=True), stage_bytes=8192)
    assert error(read(rig, (30, 11), "random", 1)) < GROUPS_TOLERANCE


MIXED = {
    "attention in bf16": ({"gate_up": "int4-g128", "down": "int4-g128"}, {"hidden": 144, "ffn": 200}, PASS),
    "two of four beside codes": ({"qkv": "2of4", "down": "2of4", "gate_up": "int8"}, {"hidden": 144, "ffn": 200}, PASS),
    "factors of rows in attention alone": ({"qkv": "fp8", "o": "fp8"}, {"hidden": 144, "ffn": 200}, PASS),
    "each another, cut along k": (
        {"qkv": "int8-asym", "o": "fp8-block128", "gate_up": "int4-g32-asym"},
        {"hidden": 256, "ffn": 512},
        PassPlan(tokens=64, tile_tokens=64, warpgroups=1, stages=3, cut_tokens=64, key_tile=32),
    ),
    "sums of parts and blocks of zeros": (
        {"qkv": "int4-g64+list5", "o": "blocks-1024of1024", "gate_up": "blocks-1of4", "down": "2of4+list36"},
        {"hidden": 144, "ffn": 1100},  # lists beside two chunks
        PASS,
    ),
    "columns of some in an order": (
        {"qkv": "int4-g32-asym", "down": "int4-g32-asym"},
        {"hidden": 144, "ffn": 200, "act_order": True},
        PASS,
    ),
    "narrow M-tiles beside whole ones": ({"qkv": "int8"}, {"hidden": 112, "ffn": 320, "heads": 4}, PASS),
}
"""Formats of matrices, where it is not bf16; the model's sizes; the pass."""
MIXED_OF_BOTH_TIERS = ("attention in bf16", "each another, cut along k")


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered(MIXED, [name for name in MIXED if name not in MIXED_OF_BOTH_TIERS]))
def test_matrices_of_a_layer_in_different_formats(case: str) -> None:
    """Also where the input of gate and up is padded to more columns than that of q, k and v."""
    formats, sizes, pass_plan = MIXED[case]
    blocks = 13 if pass_plan.cut_tokens else 2
    config = model(weight_formats=tuple(formats.items()), **sizes)
    stage_bytes = 32768 if "parts" in case else 8192
    rig = rig_of(config, blocks=blocks, pass_plan=pass_plan, stage_bytes=stage_bytes)
    assert (rig.sizes.parts(rig.sizes.table.sliced) > 1) == bool(pass_plan.cut_tokens)
    assert error(read(rig, (30, 11), "random", 1)) < GROUPS_TOLERANCE


@pytest.mark.slow
def test_weights_without_their_zeros_make_the_bits_of_dense_ones() -> None:
    """Two of four, lists, blocks of four and blocks one by one, of which M-tiles have none, some and all."""
    formats = {"qkv": "2of4", "o": "blocks-1024of1024", "gate_up": "2of4+list36", "down": "blocks-1of4"}
    config = model(hidden=144, ffn=1100, weight_formats=tuple(formats.items()))
    weights = QuantizedWeights(config)
    whole = SimpleNamespace(tensor=weights.tensor)
    rigs = (
        PassRig(config, weights=weights, stage_bytes=32768),
        PassRig(replace(config, weight_formats=()), weights=whole),
    )
    assert len({read(rig, (30, 11), "random", 1).keys_and_values().tobytes() for rig in rigs}) == 1


@pytest.mark.slow
def test_keys_of_eight_bits() -> None:
    """A pass sees the numbers that it leaves, as later passes and decoding do: no bit says where one ended."""
    config = model(heads=4, kv_heads=2)
    rig = rig_of(config, kv_dtype="e4m3")
    reference = Reference(
        config, random_weights(config).tensor, cached=lambda x: round_to_e4m3(x / KV_SCALE) * KV_SCALE
    )
    reference.forward(token_ids(53, config.vocab_size))
    wanted = np.stack([reference.keys[:, :, :53], reference.values[:, :, :53]], axis=1)
    sessions = [read(rig, parts) for parts in ((53,), (20, 33))]
    assert relative_error(sessions[0].keys_and_values()[0], wanted[0]) < TOLERANCE
    assert relative_error(sessions[0].keys_and_values(), wanted) < E4M3_TOLERANCE
    assert len({session.keys_and_values().tobytes() for session in sessions}) == 1


@pytest.mark.slow
def test_pages_and_blocks_change_no_bit() -> None:
    sessions = [read(rig_of(SMALL), (7, 40), seed=seed) for seed in range(2)]
    sessions.append(read(rig_of(SMALL, page_size=16), (7, 40)))
    assert len({session.keys_and_values().tobytes() for session in sessions}) == 1


def test_what_lies_elsewhere_in_the_pool_and_workspace_is_not_read() -> None:
    """All of it NaN but what a pass must find: nothing of a sequence that was longer is left in the next one."""
    rig = rig_of(SMALL)
    session = read(rig, (64, 50))
    session.caches[0].length = 0
    session.buffers["kv"].fill(0xFF)
    session.read({0: token_ids(20, rig.config.vocab_size)})
    again = read(rig, (20,))
    assert session.keys_and_values().tobytes() == again.keys_and_values().tobytes()


@pytest.mark.slow
def test_the_rules_of_memory_and_order_are_kept() -> None:
    for mode in ({"watched": True}, {"sanitize": True}):
        assert error(read(PassRig(model(layers=2), **mode), (9, 20), "random", 3)) < TOLERANCE


COUNTER = "wait_at_least_u64((uint64_t*)(workspace), "
BUGS = {
    "activations are copied before all blocks are done": (f"{COUNTER}copies_due);", ";"),
    "a block does not wait before it goes on": (f"{COUNTER}arrivals_due);", ";"),
    "a row sees one key too many": ("key <= position", "key <= position + 1"),
    "a tile reads the keys of another sequence": ("of_tile.w + key_tile * 16", "key_tile * 16"),
    "the last key tile is left out": ("of_tile.y + of_tile.z + 15) / 16", "of_tile.y + of_tile.z) / 16"),
    "what was summed is not brought to the new origin": ("output[group * 4] * shrinks[0]", "output[group * 4]"),
    "values are read as keys are": (", HEAD_GROUP_BYTES, CORE_BYTES);", ", CORE_BYTES, HEAD_GROUP_BYTES);"),
    "earlier keys are not all brought": ("if (key < of_segment.x)", "if (key + 3 < of_segment.x)"),
    "a hidden state is half of a neighbour's": ("column % 8 / 2", "(column % 8 + 1) / 2"),
    "hidden states are stored before all blocks are done": (
        f"if (thread == 0) {COUNTER}arrivals_due);\nnamed_barrier",
        "named_barrier",
    ),
    "values behind the last are not cleared": ("make_u32x4(0, 0, 0, 0)", "make_u32x4(0x7fc07fc0, 0, 0, 0)"),
    "narrow M-tiles are multiplied as they were loaded": ("paired != 0 ?", "false ?"),
    "rows have no weights of the norm behind them": ("* weights[2] * 0.4f", "* 0.4f"),
    "rows with a norm behind them are not multiplied": ("* weights[3] * 0.4f", "* weights[3]"),
    "all M-tiles are paired as narrow ones are": ("paired != 0 ?", "true ?"),
    "of blocks one by one each is counted before itself": ("there & ((1u << first", "there & ((2u << first"),
    "of blocks one by one the next stands for what is not there": ("(both & 1) != 0 ? begin", "true ? begin"),
}


RARE_BUGS = (
    "rows have no weights of the norm behind them",
    *("a row sees one key too many", "values are read as keys are", "earlier keys are not all brought"),
    *("values behind the last are not cleared", "what was summed is not brought to the new origin"),
    *("all M-tiles are paired as narrow ones are", "a block does not wait before it goes on"),
    *("hidden states are stored before all blocks are done", "the last key tile is left out"),
    *(name for name in BUGS if "blocks one by one" in name),
)
"""Of each there is one of its kind that `make test` looks for."""


def shown_by(bug: str) -> ModelConfig:
    """The model in which a bug shows."""
    if "blocks one by one" in bug:
        return model(layers=2, weight_formats=(("gate_up", "blocks-1024of1024"),))
    return sandwich() if "norm behind" in bug else NARROW if "narrow" in bug else model(layers=2)


@cache
def planted_rig(config: ModelConfig, bugs: tuple[str, ...]) -> PassRig:
    """With all of these bugs in one text, none of them on."""
    stages = {"stage_bytes": 32768} if config.weight_formats else {}
    return PassRig(config, bugs=[BUGS[bug] for bug in bugs], **stages)


@pytest.mark.slow
@pytest.mark.parametrize("bug", tiered(BUGS, RARE_BUGS))
def test_planted_bugs_are_found(bug: str) -> None:
    config, is_rare = shown_by(bug), bug in RARE_BUGS
    together = tuple(one for one in BUGS if shown_by(one) == config and (one in RARE_BUGS) == is_rare)

    def find(rig: PassRig) -> None:
        for scheduler in reversed(SCHEDULERS):
            for seed in range(4):
                session, ids = PassSession(rig, seed), token_ids(37, rig.config.vocab_size)
                session.read({1: ids[:9], 0: ids[:19]}, scheduler, seed)
                session.read({1: ids[9:12], 0: ids[19:]}, scheduler, seed, wanted=[20, 33])
                assert error(session) < TOLERANCE
                states = normalised(rig.config, session.states(2))
                assert relative_error(states, reference_states(rig.config, 37)[[23, 36]]) < STATES_TOLERANCE

    with (
        chosen(planted_rig(config, together), together.index(bug) + 1) as rig,
        pytest.raises((EmulatorError, AssertionError)),
    ):
        find(rig)


@pytest.mark.parametrize("quantised", ["all", "feed-forward", "attention"])
@pytest.mark.parametrize("format", ["bf16", "int4-g128", "int8-asym", "fp8", "2of4", "2of4-int4"])
def test_there_are_passes_for_every_format(format: str, quantised: str) -> None:
    gpu = gpu_named("h200")
    config = in_format(preset("llama-3.1-8b"), None if format == "bf16" else format)
    names = {"feed-forward": ("gate_up", "down"), "attention": ("qkv", "o")}.get(quantised, ())
    config = replace(config, weight_formats=tuple(one for one in config.weight_formats if not names or one[0] in names))
    plan = choose_plan(config, gpu)
    for pass_plan in (default_pass_plan(gpu, 2048, config.shape), *short_pass_plans(gpu, config.shape)):
        assert PassSizes(config, gpu, plan, pass_plan).shared.total_bytes <= gpu.shared_bytes


def test_what_a_pass_cannot_do_is_said() -> None:
    rig = rig_of(SMALL)
    with pytest.raises(PlanError, match="a pass of 40 tokens: give a multiple of 16"):
        PassSizes(SMALL, rig.sizes.gpu, rig.plan, PassPlan(40, 8, 1, 3, key_tile=16))
    with pytest.raises(PlanError, match="has no room for 64 keys"):
        PassSizes(SMALL, rig.sizes.gpu, rig.plan, PassPlan(64, 16, 1, 3, key_tile=64))
