"""The parameters of a launch: name, type, meaning and shape of each, said once; here those of the decode step.

The kernel's signature, the manifest and the check of a launch's arguments are made from `Launch`; inside the program
its fields are the kernel's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from itertools import product
from typing import Any, Self

from cheetah.blocks.timeline import EVENTS
from cheetah.lang import Expr, ty
from cheetah.models.config import ModelConfig
from cheetah.package import RANK, RANK_NUMBER, KernelParameter, of_peer, peer_parameter
from cheetah.plan import Plan
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import round_up
from cheetah.plan.kv.tables import COLUMN_WORDS, MAX_STOP_IDS, SEQUENCE_WORDS, TILE_WORDS
from cheetah.plan.products import Product

Wanted = Callable[[ModelConfig, Plan], bool]
OF_ROWS = "biases, in the order of the matrix' rows"


def parameter_field(parameter: KernelParameter) -> Any:
    return field(metadata={"parameter": parameter})


def buffer_field(type_: ty.Type, meaning: str, *shape: int | str, fill: str = "host", given: bool = False) -> Any:
    return parameter_field(KernelParameter(type_, meaning, shape, fill, given))


def number_field(meaning: str, type_: ty.Type = ty.u32) -> Any:
    return parameter_field(KernelParameter(type_, meaning))


def optional_field(wanted: Wanted, type_: ty.Type, meaning: str, *shape: int | str, fill: str = "host") -> Any:
    """A buffer that some plans or families have, those of which `wanted` is true."""
    parameter = KernelParameter(type_, meaning, shape, fill)
    return field(default=None, metadata={"parameter": parameter, "wanted": wanted})


def rank_field() -> Any:
    """Where several GPUs launch the kernel."""
    return field(default=None, metadata={"parameter": RANK_NUMBER})


def timeline_field(meaning: str, fill: str) -> Any:
    """Where the kernel is traced."""
    shape = ("blocks", "phases", len(EVENTS))
    return field(default=None, metadata={"parameter": KernelParameter(ty.ptr_mut(ty.u64), meaning, shape, fill)})


def taps_field() -> Any:
    return optional_field(
        lambda config, plan: bool(plan.taps),
        *(ty.ptr_mut(ty.bf16), "what tapped layers leave of every token, not normalised, side by side"),
        *("tap_rows", "taps", "padded_hidden"),
        fill="poison",
    )


def peers_field(*buffers: str) -> Any:
    """Where these buffers of the other ranks lie, by their names, that of the next rank first; a parameter each."""
    return field(default_factory=dict, metadata={"peers": buffers})


def hidden_states_parameter(type_: ty.Type, given: bool = False) -> KernelParameter:
    """What passes over prompts leave, and the head begins with; `given`: the buffer is another kernel's."""
    meaning = "the last layer's output of tokens, not normalised, a row each"
    return KernelParameter(type_, meaning, ("hidden_rows", "padded_hidden"), "poison", given)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelLaunch:
    """What kernels of the whole model begin their parameters with, its weights and its cache; and, behind those that a
    kernel always has, what some models have beside them."""

    weights: Expr = buffer_field(ty.ptr(ty.u8), "packed matrices of all layers, then the head", "weight_bytes")
    norms: Expr = buffer_field(ty.ptr(ty.bf16), "norm weights: two a layer, then the last", "norms", "padded_hidden")
    embedding: Expr = buffer_field(ty.ptr(ty.bf16), "one row a token id", "vocab", "padded_hidden")
    rope: Expr = buffer_field(ty.ptr(ty.f32), "cos and sin of every position", "max_context", "half_head_dim", 2)
    kv: Expr = buffer_field(
        *(ty.ptr_mut(ty.bf16), "paged key/value pool (HND)"),
        *("layers", "kv_pages", 2, "kv_heads", "page_size", "head_dim"),
        fill="poison",
    )
    page_table: Expr = buffer_field(ty.ptr(ty.i32), "every sequence's pages, in order", "batch", "pages_per_sequence")
    kv_pages: Expr = number_field("pages of the pool")
    kv_scales: Expr | None = optional_field(
        lambda config, plan: plan.kv_dtype == "e4m3",
        *(ty.ptr(ty.f32), "what e4m3 codes of each layer's keys, then values, are multiplied by"),
        *("layers", 2, "kv_heads"),
    )
    biases: Expr | None = optional_field(
        lambda config, plan: config.has_biases,
        *(ty.ptr(ty.bf16), "of q, k and v, in the order of the matrix' rows", "layers", "qkv_rows"),
    )
    o_biases: Expr | None = optional_field(
        lambda config, plan: config.has_out_biases, ty.ptr(ty.bf16), f"o's {OF_ROWS}", "layers", "o_rows"
    )
    router_biases: Expr | None = optional_field(
        lambda config, plan: config.has_expert_biases,
        *(ty.ptr(ty.bf16), f"the router's {OF_ROWS}", "layers", "router_rows"),
    )
    gate_up_biases: Expr | None = optional_field(
        lambda config, plan: config.has_expert_biases,
        *(ty.ptr(ty.bf16), f"of each expert's gate and up {OF_ROWS}", "layers", "experts", "gate_up_rows"),
    )
    down_biases: Expr | None = optional_field(
        lambda config, plan: config.has_expert_biases,
        *(ty.ptr(ty.bf16), f"of each expert's down {OF_ROWS}", "layers", "experts", "o_rows"),
    )
    head_norms: Expr | None = optional_field(
        lambda config, plan: config.head_norms is not None,
        *(ty.ptr(ty.bf16), "weights of the norms of each layer's queries, then keys", "layers", 2, "head_dim"),
    )
    sinks: Expr | None = optional_field(
        lambda config, plan: config.has_sinks,
        *(ty.ptr(ty.bf16), "a logit of every query head's, whose key has no value", "layers", "heads"),
    )
    norms_behind: Expr | None = optional_field(
        lambda config, plan: config.norms.after,
        *(ty.ptr(ty.bf16), "weights of the norms behind each layer's attention, then feed-forward"),
        *("layers", 2, "padded_hidden"),
    )
    delta_taps: Expr | None = optional_field(
        lambda config, plan: bool(config.delta_layers),
        ty.ptr(ty.bf16),
        "of every channel of each layer of Gated DeltaNet, what a token and those before are times",
        *("delta_layers", "channels", "mixed_tokens"),
    )
    delta_numbers: Expr | None = optional_field(
        lambda config, plan: bool(config.delta_layers),
        *(ty.ptr(ty.f32), "of each layer of Gated DeltaNet: see cheetah.plan.delta", "delta_layers", "delta_numbers"),
    )
    states: Expr | None = optional_field(
        lambda config, plan: bool(config.delta_layers),
        *(ty.ptr_mut(ty.u32), "what sequences remember in layers of Gated DeltaNet: see cheetah.plan.delta"),
        *("state_slots", "delta_layers", "shares", "share_words"),
        fill="zero",
    )
    state_slots: Expr | None = optional_field(
        lambda config, plan: bool(config.delta_layers), ty.ptr(ty.i32), "which of `states` each sequence has", "batch"
    )
    places: Expr | None = optional_field(
        lambda config, plan: config.act_order,
        *(ty.ptr(ty.u16), "where columns of ordered matrices lie: see cheetah.models.act_order"),
        *("ordered_inputs", "longest_input"),
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The launch of a kernel's arguments by name."""
        own: dict[str, Any] = {}
        peers: dict[str, tuple[Expr, ...]] = {}
        for name, value in arguments.items():
            if (peer := of_peer(name)) is None:
                own[name] = value
            else:
                peers[peer[0]] = (*peers.get(peer[0], ()), value)
        if peers:
            own["peers"] = peers
        return cls(**own)


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch(ModelLaunch):
    """The kernel's parameters, in order."""

    kv_plans: Expr = buffer_field(ty.ptr(ty.i32), "attention schedules of the launch", "plans", "plan_words")
    tiles: Expr = buffer_field(
        ty.ptr(ty.i32), "which columns read which keys: see cheetah.plan.kv.tables", "tiles", TILE_WORDS
    )
    sequences: Expr = buffer_field(
        ty.ptr(ty.i32), "the launch's sequences: see cheetah.plan.kv.tables", "batch", SEQUENCE_WORDS
    )
    columns: Expr = buffer_field(
        ty.ptr(ty.i32), "the launch's columns: see cheetah.plan.kv.tables", "columns", COLUMN_WORDS
    )
    exchange: Expr = buffer_field(
        *(ty.ptr_mut(ty.u8), "workspace through which blocks exchange vectors; zeroed once", "exchange_bytes"),
        fill="zero",
    )
    tokens: Expr = buffer_field(
        ty.ptr_mut(ty.i32),
        "of every sequence: inputs, and what the kernel makes of them; -1 where no logit is a number",
        *("batch", "token_room"),
    )
    emitted: Expr = buffer_field(
        *(ty.ptr_mut(ty.u32), "the same as they are made, in the host's memory", "batch", "token_room"), fill="mapped"
    )
    cancelled: Expr = buffer_field(
        *(ty.ptr(ty.u32), "in the host's memory: the launch's epoch for a sequence that is to end", "batch"),
        fill="mapped",
    )
    stop_ids: Expr = buffer_field(ty.ptr(ty.i32), "token ids that end a sequence", MAX_STOP_IDS)
    masks: Expr = buffer_field(ty.ptr(ty.u32), "which tokens a sequence may sample, a bit each", "batch", "mask_words")
    logit_bias: Expr = buffer_field(ty.ptr(ty.f32), "what is added to a sequence's logits", "batch", "vocab")
    token_counts: Expr = buffer_field(
        *(ty.ptr_mut(ty.u32), "which tokens a sequence has: see cheetah.plan.kv.tables", "batch", "vocab"),
    )
    weighed: Expr = buffer_field(
        *(ty.ptr_mut(ty.f32), "a filtered sequence's logits over its temperature, without and with noise"),
        *("batch", "vocab", 2),
        fill="poison",
    )
    logits: Expr = buffer_field(
        ty.ptr_mut(ty.f32), "of every step and column, if wanted", "steps", "columns", "vocab", given=True
    )
    progress: Expr = buffer_field(ty.ptr_mut(ty.u32), "how far each block is", "blocks", fill="zero")
    status: Expr = buffer_field(ty.ptr_mut(ty.i32), "[0]: steps done", 8, fill="zero")
    steps: Expr = number_field("most steps to make")
    head_from: Expr = number_field("first step whose samples are wanted")
    column_count: Expr = number_field("columns in use")
    plan_count: Expr = number_field("schedules in `kv_plans`")
    options: Expr = number_field("all bits of the sequences' options: see cheetah.plan.kv.tables")
    epoch: Expr = number_field("first of the launch's exchange epochs: steps * epochs_of_step(layers) are used")
    delta_records: Expr | None = optional_field(
        lambda config, plan: bool(config.delta_layers) and plan.drafts > 0,
        *(ty.ptr_mut(ty.u32), "what columns of the last step would change in `states`: see cheetah.plan.delta"),
        *("delta_layers", "shares", "columns", "record_words"),
    )
    router_rows: Expr | None = optional_field(
        lambda config, plan: plan.fused_router > 0,
        *(ty.ptr(ty.bf16), "of every expert what its logit has of the residual, then of attention's output"),
        *("layers", "experts", "router_row"),
    )
    history: Expr = optional_field(
        lambda config, plan: plan.drafts > 0,
        *(ty.ptr_mut(ty.u32), "every sequence's tokens by position, a row a slot, where drafts are looked up"),
        *("batch", "history_room"),
    )
    judges: Expr = optional_field(
        lambda config, plan: plan.drafts > 0,
        *(ty.ptr_mut(ty.u32), "of every token behind one of the launch, the row of `logits` that judges it"),
        *("batch", "token_room"),
    )
    rounds: Expr = optional_field(
        lambda config, plan: plan.drafts > 0,
        *(ty.ptr_mut(ty.u32), "of every sequence, what came of its drafts: see cheetah.plan.kv.tables"),
        *("batch", "round_words"),
    )
    taps: Expr = taps_field()
    features: Expr = optional_field(
        lambda config, plan: config.drafter is not None,
        *(ty.ptr(ty.bf16), "what tapped layers of another model leave of tokens, side by side, by pages as keys"),
        *("kv_pages", "page_size", "tapped", "padded_hidden"),
        fill="zero",
    )
    feature_steps: Expr = optional_field(
        lambda config, plan: config.drafter is not None,
        *(ty.ptr(ty.u32), "first step in which no column has features", 1),
    )
    token_ids: Expr | None = optional_field(
        lambda config, plan: config.drafter is not None and not config.drafter.joins_residual,
        *(ty.ptr(ty.u32), "which token each row of the head stands for", "head_rows"),
    )
    state_norm: Expr = optional_field(
        lambda config, plan: config.drafter is not None and config.drafter.joins_residual,
        *(ty.ptr(ty.bf16), "weights of the norm of what tapped layers leave", "padded_hidden"),
    )
    known_norm: Expr = optional_field(
        lambda config, plan: config.block is not None,
        *(ty.ptr(ty.bf16), "weights of the norm of what is known of tokens", "padded_hidden"),
    )
    known_rows: Expr = optional_field(
        lambda config, plan: config.block is not None,
        *(ty.ptr(ty.bf16), "of tokens that are known, by their pages: see cheetah.plan.known"),
        *("kv_pages", "page_size", "padded_hidden"),
        fill="poison",
    )
    rank: Expr | None = rank_field()
    peers: Mapping[str, tuple[Expr, ...]] = peers_field("exchange", "taps")
    timeline: Expr | None = timeline_field(
        "nanoseconds of the events of every phase in the last step: see cheetah.blocks.timeline", "poison"
    )


def buffer_of(parameter: str) -> str:
    """The parameter itself, or that of which it is a peer's."""
    peer = of_peer(parameter)
    return parameter if peer is None else peer[0]


def in_all_memories(launch: Any, buffer: str) -> tuple[Expr, ...]:
    """Where a buffer of a launch lies in this GPU's memory, and in those of its peers."""
    return getattr(launch, buffer), *launch.peers.get(buffer, ())


def kernel_parameters(
    config: ModelConfig, plan: Plan, traced: bool = False, ranks: int = 1
) -> dict[str, KernelParameter]:
    """The parameters of a plan's kernel by name, in the order of its signature. traced: with a timeline; ranks: GPUs
    that make its steps together."""
    return parameters_of(Launch, config, plan, traced, ranks)


def parameters_of(
    launch: type[ModelLaunch], config: ModelConfig, plan: Plan, traced: bool, ranks: int = 1
) -> dict[str, KernelParameter]:
    """The fields of a launch that its kernel has, by name in order. plan: of decoding; traced: with a timeline; ranks:
    GPUs that launch it together."""
    parameters: dict[str, Any] = {}
    wanted = {"timeline": traced, RANK: ranks > 1}
    for one in sorted(fields(launch), key=_is_of_some):
        if "wanted" in one.metadata:
            wanted[one.name] = one.metadata["wanted"](config, plan)
        if "parameter" in one.metadata:
            parameters[one.name] = one.metadata["parameter"]
        for buffer, further in product(one.metadata.get("peers", ()), range(1, ranks)):
            meaning = f"`{buffer}` of the rank {further} further on"
            its = parameters[buffer]
            parameters[peer_parameter(buffer, further)] = KernelParameter(its.type, meaning, given=its.given)
    if plan.kv_dtype == "e4m3":
        parameters["kv"] = replace(parameters["kv"], type=ty.ptr_mut(ty.u8))
    if config.shape.rotations > 1:
        rope = parameters["rope"]
        meaning = f"{rope.meaning}, by the layers' tables: see cheetah.models.attention_layers"
        parameters["rope"] = replace(rope, meaning=meaning, shape=("rotations", *rope.shape))
    if config.delta_layers:
        for name in ("kv", "head_norms"):
            if name in parameters:
                shape = parameters[name].shape
                parameters[name] = replace(parameters[name], shape=("attention_layers", *shape[1:]))
    if config.head_norms == "width":
        parameters["head_norms"] = replace(parameters["head_norms"], shape=("layers", "rotated_rows"))
    if plan.drafts and "masks" in parameters:  # a sequence's columns are filtered, each behind other drafts
        parameters["masks"] = replace(parameters["masks"], shape=("mask_rows", "mask_words"))
        weighed = parameters["weighed"]
        parameters["weighed"] = replace(
            weighed,
            meaning="a filtered column's logits over its temperature, without and with noise",
            shape=("columns", *weighed.shape[1:]),
        )
    joins_residual = config.drafter is not None and config.drafter.joins_residual
    if config.drafter is not None and not joins_residual:
        meaning = "what each token adds to the rows of q, k and v"
        parameters["embedding"] = replace(parameters["embedding"], meaning=meaning, shape=("vocab", "qkv_rows"))
    return {name: one for name, one in parameters.items() if wanted.get(buffer_of(name), True)}


def _is_of_some(one: Field[Any]) -> bool:
    """Whether a launch's field is not of all its kernels, so that its parameter comes behind those that are."""
    return (one.default, one.default_factory) != (MISSING, MISSING)


def biases_of_layer(launch: ModelLaunch, product: Product, layer: Any) -> Any:
    """Where the biases of a product in a layer begin, [row] or of each expert; None without."""
    biases = getattr(launch, f"{product.name}_biases", None)
    if biases is None:
        return None
    count = 1 if product.experts is None else product.experts.count
    return biases + layer * (count * bias_rows(product))


def bias_rows(product: Product) -> int:
    """Biases of a product, or of one of its experts, with those that fill the last M-tile."""
    return round_up(product.rows, M_TILE_ROWS)
