"""The plan by rule, its refusals, and the matrices that follow from it."""

from dataclasses import replace

import pytest

from cheetah.errors import CheetahError
from cheetah.plan import (
    GPUS,
    Gpu,
    ModelShape,
    Plan,
    PlanError,
    Region,
    default_plan,
    gpu_named,
    shared_map,
    step_matrices,
)
from cheetah.plan.formats import DIGITS, STAGGERED

from .shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B, LLAMA_70B, TINY

SHAPES = [LLAMA_1B, LLAMA_3B, LLAMA_8B, LLAMA_70B, TINY]


def plan_for(shape, gpu="h200", **overrides):
    return default_plan(GPUS[gpu], shape, **overrides)


def test_plan_error_is_a_user_error():
    assert issubclass(PlanError, CheetahError)


def test_gpus_are_named_by_their_key_and_unknown_names_list_them():
    assert all(name == gpu.name for name, gpu in GPUS.items())
    assert [GPUS[name].blocks for name in ("emulator-2", "emulator", "emulator-8")] == [2, 4, 8]
    with pytest.raises(PlanError, match="gpu 'a100' is not known: choose one of h200, h100, emulator"):
        gpu_named("a100")
    with pytest.raises(PlanError, match="blocks is 0"):
        Gpu("x", "sm_90a", 0, 1, 1.0, 1, "")
    with pytest.raises(PlanError, match="read_gb_per_s is 0"):
        Gpu("x", "sm_90a", 1, 1, 0, 1, "")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_plan_holds_its_constraints(shape, gpu):
    plan = plan_for(shape, gpu)
    assert plan.stage_bytes % (plan.consumer_warps * 1024) == 0
    assert plan.kv_stage_tokens(shape.head_dim) % 16 == 0
    assert plan.kv_stage_tokens(shape.head_dim) * 4 * shape.head_dim == plan.stage_bytes
    assert 2 <= plan.stages and plan.in_flight < plan.stages
    assert shared_map(shape, plan, GPUS[gpu]).total_bytes <= GPUS[gpu].shared_bytes


def test_default_plan_on_an_h200_is_the_one_that_measured_best():
    plan = plan_for(LLAMA_8B)
    assert (plan.consumer_warps, plan.stage_bytes, plan.stages, plan.in_flight) == (8, 16384, 12, 4)
    assert plan.sync == "flags" and plan.threads == (8 + 4) * 32 and plan.moves_registers
    assert plan.kv_stage_tokens(128) == 32


def test_default_plan_on_the_emulator_is_small():
    plan = plan_for(TINY, "emulator")
    assert (plan.consumer_warps, plan.stage_bytes, plan.stages) == (4, 4096, 8)
    assert plan_for(LLAMA_8B, "emulator").stage_bytes == 8192, "K and V of 16 tokens at head_dim 128 are 8 KB"


def test_stages_are_as_many_as_fit():
    plan = plan_for(LLAMA_8B)
    with pytest.raises(PlanError, match="shared memory: .* a block has 227 KB"):
        plan_for(LLAMA_8B, stages=plan.stages + 1)
    assert plan_for(LLAMA_8B, reserve=lambda *_: [Region("all", 100 * 1024)]).stages == 7


def test_overrides_win_and_none_means_by_rule():
    plan = plan_for(LLAMA_8B, stages=4, in_flight=2, sync="barrier", max_steps=37, batch=None)
    assert (plan.stages, plan.in_flight, plan.sync, plan.max_steps, plan.batch) == (4, 2, "barrier", 37, 1)
    assert plan_for(LLAMA_8B, stages=2).in_flight == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"stage_bytes": 8192, "consumer_warps": 16},
            "stage_bytes is 8192 with 16 consumer warps: .* use a multiple of 16384",
        ),
        (
            {"stage_bytes": 4096, "sync": "barrier", "tokens": 8},
            "stage_bytes is 4096 with 8 consumer warps: .* use a multiple of 8192",
        ),
        ({"stage_bytes": 6144, "consumer_warps": 6}, "head_dim 128: .* use a multiple of 8192"),
        ({"consumer_warps": 3}, "consumer_warps is 3: .* use an even number"),
        ({"consumer_warps": 32}, "consumer_warps is 32 and adding_warps 3, and one copies: a block has 32 warps"),
        (
            {"consumer_warps": 30, "adding_warps": 1, "stage_bytes": 122880},
            "consumer_warps is 30: use a multiple of 4",
        ),
        ({"adding_warps": -1}, "adding_warps is -1: give a number of warps"),
        ({"tokens": 8, "adding_warps": 3}, "adding_warps is 3 with 8 tokens: they share 4 pairs of columns evenly"),
        ({"consumer_warps": 0}, "consumer_warps is 0"),
        ({"stages": 1}, "stages is 1: a ring needs at least 2"),
        ({"stages": 4, "in_flight": 4}, "in_flight 4 of 4 stages: give at most 3"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"in_flight": 3, "in_flight_waiting": 4}, "in_flight_waiting is 4 with in_flight 3: give at most as many"),
        ({"sync": "hope"}, "sync is 'hope': choose one of flags, barrier"),
        ({"batch": 9}, "batch is 9: at most 8"),
        ({"tokens": 3}, "tokens is 3: a step takes 1, 2, 4, 8, 16, 32, 64 together"),
        ({"tokens": 128}, "tokens is 128: a step takes"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 2, "batch": 4}, "tokens is 2 with batch 4: each sequence has one at least"),
        (
            {"tokens": 4, "consumer_warps": 6, "stage_bytes": 24576},
            "tokens is 4 with 6 consumer warps: .* share the tokens",
        ),
        (
            {"tokens": 32, "consumer_warps": 2, "stage_bytes": 8192},
            "tokens is 32 with 2 consumer warps: .* at most 8 a warp",
        ),
        ({"tokens": 64}, "512 KB of scratch .* or fewer tokens"),
        ({"down_slices": 0}, "down_slices is 0"),
        ({"tokens": 8, "down_slices": 1}, "224 KB of scratch"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8': choose one of bf16, e4m3"),
        ({"kv_dtype": "e4m3", "stage_bytes": 2048, "consumer_warps": 2}, "head_dim 128: .* use a multiple of 4096"),
        ({"kv_chunk": 100}, "kv_chunk 100 is no multiple of 16, nor 0"),
        ({"kv_chunk": -16}, "kv_chunk -16 is no multiple"),
        ({"page_size": 0}, "page_size is 0"),
        ({"max_context": 1.5}, "max_context is 1.5"),
        ({"stage_bytes": 2**20}, "stage_bytes is 1048576: an mbarrier counts below 1048576"),
        ({"pagesize": 3}, "unknown field pagesize: the fields are .*page_size"),
    ],
)
def test_impossible_choices_are_refused(overrides, message):
    with pytest.raises(PlanError, match=message):
        plan_for(LLAMA_8B, **overrides)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_a_step_has_a_column_for_every_sequence(batch, tokens):
    plan = plan_for(LLAMA_8B, batch=batch)
    assert (plan.batch, plan.tokens) == (batch, tokens)
    assert plan.launch_tokens == 64 * tokens


@pytest.mark.parametrize("gpu", ["h200", "h100", "emulator"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_products_inputs_fit_with_eight_columns(shape, gpu):
    plan = plan_for(shape, gpu, batch=8)
    shared = shared_map(shape, plan, GPUS[gpu])
    vector = next(region for region in shared.regions if region.name == "vector")
    part = -(-shape.table.sliced.input.padded // plan.down_slices)
    together = 2 if plan.sync == "barrier" and plan.down_slices > 1 else 1  # parts that come ahead
    assert vector.nbytes >= 8 * 2 * max(*(one.input.padded for one in shape.table.whole), together * part)
    assert plan.stages > plan.in_flight
    assert step_matrices(shape, plan, GPUS[gpu])[shape.table.sliced].slices == plan.down_slices


def test_a_vector_of_one_token_is_brought_in_halves_and_of_several_in_parts_no_longer_than_the_others():
    assert [plan_for(LLAMA_8B, tokens=tokens).down_slices for tokens in (1, 2, 4)] == [2, 4, 4]
    assert plan_for(LLAMA_8B, tokens=4, down_slices=2).down_slices == 2


def test_parts_that_come_ahead_lie_two_together_where_the_other_vectors_do():
    plan = plan_for(LLAMA_8B, tokens=8, sync="barrier")
    slices = [layout.slices for layout in step_matrices(LLAMA_8B, plan, GPUS["h200"])]
    assert slices == [1, 1, 1, 7, 1]  # 14336 elements in parts of 2048, two of which are as long as the others, 4096
    assert shared_map(LLAMA_8B, plan, GPUS["h200"]).region("vector").nbytes == 8 * 2 * 4096
    assert plan_for(LLAMA_8B, tokens=8).down_slices == 4
    assert plan_for(LLAMA_8B, sync="barrier").down_slices == 7


def test_vectors_beside_4_bit_weights_come_by_the_grid_barrier_with_eight():
    shape = replace(LLAMA_8B, formats=tuple((name, "int4-g128") for name in ("qkv", "o", "gate_up", "down")))
    plans = [plan_for(shape, tokens=tokens) for tokens in (1, 2, 4, 8)]
    assert [(plan.down_slices, plan.sync) for plan in plans] == [
        *((1, "flags"), (1, "flags")),
        *((2, "flags"), (7, "barrier")),
    ]
    assert [plan.in_flight_waiting for plan in plans] == [2, 2, 2, 2]
    of_8_bits = replace(shape, formats=tuple((name, "fp8") for name, _ in shape.formats))
    assert [plan_for(of_8_bits, tokens=tokens).sync for tokens in (2, 4, 8)] == ["flags", "flags", "barrier"]
    assert plan_for(LLAMA_8B).in_flight_waiting == 3


def test_what_attention_keeps_while_it_works_lies_one_after_the_other_over_the_vector():
    shared = shared_map(LLAMA_8B, plan_for(LLAMA_8B, batch=8), GPUS["h200"])
    sizes = {region.name: region.nbytes for region in shared.regions}
    assert sizes["attention"] == 8 * 8 * 128 * 4  # warps, columns, dims at a time, f32: there is room for all dims
    assert sizes["queries"] == 4 * 4 * 128 * 2  # columns of a tile, heads of a group, dims, bf16
    assert sizes["newest"] == 2 * 16 * 128 * 2  # keys and values, columns rounded up to 16
    assert shared.offset("attention") == shared.offset("scratch") == shared.offset("vector")
    assert shared.offset("queries") == shared.offset("attention") + sizes["attention"]
    assert shared.offset("newest") == shared.offset("queries") + sizes["queries"]


def test_a_tile_of_attention_has_the_rows_that_a_warp_can_take():
    assert plan_for(LLAMA_8B, tokens=16).tile_columns(LLAMA_8B) == 4  # 16 rows, two column tiles of 8
    assert plan_for(LLAMA_8B, tokens=2).tile_columns(LLAMA_8B) == 2
    assert plan_for(LLAMA_8B, tokens=16).tile_columns(replace(LLAMA_8B, kv_heads=2)) == 1
    assert plan_for(LLAMA_8B, tokens=16).tile_columns(replace(LLAMA_8B, head_dim=256)) == 2


def test_codes_of_eight_bits_have_twice_the_tokens_in_a_stage():
    plan = plan_for(LLAMA_8B, kv_dtype="e4m3")
    assert plan.kv_stage_tokens(128) == 2 * plan_for(LLAMA_8B).kv_stage_tokens(128) == 64


@pytest.mark.parametrize(("tokens", "digits"), [(1, 4), (2, 2), (4, 0)])
def test_four_bits_are_multiplied_by_digits_where_that_pays(tokens, digits):
    shape = replace(LLAMA_8B, formats=tuple((name, "int4-g128") for name in ("qkv", "o", "gate_up", "down")))
    gpu = GPUS["h200"]
    plan = default_plan(gpu, shape, tokens=tokens, batch=tokens)
    layouts = step_matrices(shape, plan, gpu).of_layer
    kinds = {one.name: one.vector_kind(tokens) for one in layouts}
    in_digits = ("gate_up", "down") if digits == 2 else kinds if digits else ()
    assert kinds == {name: DIGITS if name in in_digits else STAGGERED for name in kinds}
    room = {region.name: region.nbytes for region in shared_map(shape, plan, gpu).regions}
    tiles = {one.name: one.k_tiles if one.slices == 1 else one.slice_chunks * one.tiles_per_chunk for one in layouts}
    assert max(one.vector_units(tokens) * tiles[one.name] * 16 for one in layouts) <= room["vector"]
    assert max(one.sums_bytes(tokens) * tiles[one.name] for one in layouts) <= room.get("vector_sums", 0)


def test_plan_survives_a_dictionary():
    plan = plan_for(LLAMA_70B, page_size=64)
    assert Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(PlanError, match="missing field consumer_warps, stages"):
        Plan.from_dict({"stage_bytes": 16384})


def test_pages_cover_the_context():
    plan = plan_for(LLAMA_1B, page_size=64, max_context=1000, batch=3)
    assert (plan.pages_per_sequence, plan.kv_pages) == (16, 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 5}, "32 heads on 5 KV heads"),
        ({"head_dim": 100}, "head_dim is 100"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        ModelShape(**{**vars(LLAMA_8B), **change})


@pytest.mark.parametrize("gpu", ["h200", "emulator", "emulator-8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_lie_one_after_another(shape, gpu):
    matrices = step_matrices(shape, plan_for(shape, gpu), GPUS[gpu])
    end = 0
    for layer in range(shape.layers):
        for layout in matrices.of_layer:
            assert matrices.offset(layout.name, layer) == end
            assert end % 1024 == 0
            end += layout.total_bytes
    assert matrices.offset("lm_head") == end
    assert matrices.weight_bytes == end + matrices.head.total_bytes


def test_matrices_have_the_rows_and_columns_of_the_model():
    matrices = step_matrices(LLAMA_8B, plan_for(LLAMA_8B), GPUS["h200"])
    assert {layout.name: (layout.rows, layout.columns) for layout in matrices} == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }
    assert matrices.describe()[3] == {
        "name": "down",
        "rows": 4096,
        "columns": 14336,
        "format": "bf16",
        "offset": (6144 + 4096 + 28672) * 4096 * 2,
        "layer_stride": matrices.layer_stride,
        "layers": 32,
        "start": 0,
    }
    with pytest.raises(PlanError, match="no matrix 'up': there are qkv, o, gate_up, down, lm_head"):
        matrices.named("up")
    with pytest.raises(PlanError, match="layer 32 does not exist: there are layers 0 to 31"):
        matrices.offset("o", 32)


def test_gate_up_has_a_m_tile_for_every_eight_gate_rows():
    shape = ModelShape(**{**vars(TINY), "ffn": 100})
    matrices = step_matrices(shape, plan_for(shape, "emulator"), GPUS["emulator"])
    assert matrices.named("gate_up").m_tiles == 13 and matrices.named("down").columns == 100


@pytest.mark.parametrize("shape", SHAPES)
def test_a_residual_row_has_one_owner_and_rotation_evens_the_layer(shape):
    gpu = GPUS["h200"]
    rotated = step_matrices(shape, plan_for(shape), gpu)
    assert len({rotated[product].split for product in shape.table.onto_residual}) == 1

    def largest(layouts):
        return max(sum(layout.block_bytes(block) for layout in layouts) for block in range(gpu.blocks))

    assert largest(rotated.of_layer) <= largest([replace(layout, start=0) for layout in rotated.of_layer])


@pytest.mark.parametrize("gpu", ["h200", "emulator-8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_other_matrices_begin_where_o_and_down_end(shape, gpu):
    matrices = step_matrices(shape, plan_for(shape, gpu), GPUS[gpu])
    o = matrices[shape.table.onto_residual[0]]
    following = (o.split.owner(o.m_tiles - 1) + 1) % GPUS[gpu].blocks
    others = [matrices[product] for product in shape.table if not product.adds]
    assert [layout.split.owner(0) for layout in others] == [following] * 3


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("max_steps", [0], r"max_steps is \[0\]: give a whole number"),
        ("stages", "3", "stages is '3': give a whole number"),
        ("tokens", None, "tokens is None: give a whole number"),
        ("page_size", True, "page_size is True: give a whole number"),
        ("sync", 1, "sync is 1: give a word"),
        ("max_context", 10**30, "max_context is 1000000000000000000000000000000: give at most 2147483647"),
        ("batch", 10**999, "batch is an integer of about 1000 digits: give at most"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(field: str, value: object, wanted: str) -> None:
    fields = {"consumer_warps": 8, "stage_bytes": 16384, "stages": 4, field: value}
    with pytest.raises(PlanError, match=f"Plan: {wanted}"):
        Plan.from_dict(fields)


def test_few_chunks_are_requested_beside_tiny_layers():
    shape = ModelShape(hidden=1024, ffn=3072, vocab=151936, heads=16, kv_heads=8, head_dim=128, layers=28)
    plans = [plan_for(shape), plan_for(shape, tokens=2), plan_for(LLAMA_1B)]
    assert [(plan.in_flight, plan.in_flight_waiting) for plan in plans] == [(2, 1), (3, 2), (3, 2)]
    assert [plan.down_slices for plan in plans] == [1, 2, 2]
