"""The table of what a step is made of: who makes what, who reads it, and the numbers of rows that products share."""

import pytest

from cheetah.models.dense.step_sizes import exchange_sizes
from cheetah.plan import GPUS, PlanError, default_plan
from cheetah.plan.products import STEP_EXCHANGES

from .shapes import LLAMA_8B, TINY

TABLE = TINY.table


def test_what_a_phase_waits_for_the_phase_before_has_made():
    for phase, before in zip(TABLE.layer, (TABLE.layer[-1], *TABLE.layer[:-1]), strict=True):
        assert phase.input == before.output
    assert TABLE.head.input == TABLE.layer[-1].output and TABLE.head.output is None


def test_a_matrix_has_the_rows_of_its_sources_and_pairs_whole_m_tiles():
    rows = {product.name: product.rows for product in TABLE}
    assert rows == {"qkv": 320, "o": 200, "gate_up": 1024, "down": 200, "lm_head": 1003}
    assert TABLE.reader_of(TABLE.attention).name == "o"
    assert [source.name for product in TABLE for source in product.sources] == [
        *("q", "k", "v", "o", "gate", "up", "down", "lm_head")
    ]


def test_the_vectors_of_a_table_are_those_that_a_step_exchanges():
    gpu = GPUS["emulator"]
    sizes = exchange_sizes(TINY, gpu, default_plan(gpu, TINY))
    assert sorted(sizes) == sorted((*TABLE.exchanges, *STEP_EXCHANGES))


def test_rows_of_norms_and_places_are_numbered_layer_by_layer_and_the_last_is_the_heads():
    norms = [TABLE.norm_row(one, layer) for layer in range(TABLE.layers) for one in TABLE.norms]
    assert [*norms, TABLE.norm_row(TABLE.head, None)] == list(range(TABLE.norm_count))
    places = [TABLE.places_row(one, layer) for layer in range(TABLE.layers) for one in TABLE.placed]
    assert [*places, TABLE.places_row(TABLE.head, None)] == list(range(TABLE.places_count))


def test_behind_a_product_onto_the_residual_comes_the_norm_of_who_reads_it():
    for layer in range(TABLE.layers):
        o, down = TABLE.onto_residual
        assert TABLE.norm_behind(o, layer) == TABLE.norm_row(TABLE.reader_of(o), layer)
        is_last = layer == TABLE.layers - 1
        behind = TABLE.norm_row(TABLE.head, None) if is_last else TABLE.norm_row(TABLE.products[0], layer + 1)
        assert TABLE.norm_behind(down, layer) == behind


def test_the_input_that_nobody_places_comes_from_rows_that_are_packed_in_its_order():
    packed = {product.name: [one.name for one in TABLE.packed_for(product.name)] for product in TABLE}
    assert packed == {"qkv": [], "o": [], "gate_up": ["down"], "down": [], "lm_head": []}


def test_a_table_is_made_once_and_names_what_there_is():
    assert LLAMA_8B.table is LLAMA_8B.table
    with pytest.raises(PlanError, match="no matrix 'up': there are qkv, o, gate_up, down, lm_head"):
        TABLE.named("up")
