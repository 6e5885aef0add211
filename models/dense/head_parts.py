"""What a launch that chooses tokens is written with: the blocks of its kernel put together, and the phases behind the
layers, which the decode step and the head alone have in common."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.advance import advance_of
from cheetah.blocks.block_tokens import BlockTokens
from cheetah.blocks.columns import Columns
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.filters.filters import Filters
from cheetah.blocks.host_words import HostWords
from cheetah.blocks.linear.epilogue import AddResidual, Biases, Fixed, NormWeights, PublishedRows
from cheetah.blocks.linear.interface import Epilogue, Prologue, Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.names import with_names
from cheetah.blocks.linear.prologue import Slices
from cheetah.blocks.linear.rms import InverseRms, PublishedSquares
from cheetah.blocks.linear.taps import Tap
from cheetah.blocks.machine import Machine
from cheetah.blocks.made_list import MadeList
from cheetah.blocks.phase import Phases
from cheetah.blocks.ring import Ring
from cheetah.blocks.sampling import Sampler
from cheetah.blocks.timeline import Timeline
from cheetah.blocks.tokens import Tokens
from cheetah.blocks.verified_tokens import VerifiedTokens
from cheetah.lang import prim, ty
from cheetah.models.act_order import places_shape
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch
from cheetah.models.dense.page import (
    Multiply,
    Page,
)
from cheetah.plan import M_TILE_ROWS, step_matrices
from cheetah.plan.index import round_up
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.plan.products import Product, Vector


class HeadParts:
    """The blocks of a launch that chooses tokens, and what its last two phases are written with. page: all its phases;
    rows: of the embedding, if they are not those of the token ids."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        launch: Launch,
        exchange: Exchange,
        page: Page,
        rows: int | None = None,
    ) -> None:
        self.config, self.machine, self.launch = config, machine, launch
        self.shape, self.table, self.exchange = machine.model, machine.stack, exchange
        self.matrices = with_names(step_matrices(self.shape, machine.plan, machine.gpu), machine.plan.stage_bytes)
        self.residual = self.matrices[self.table.onto_residual[0]]
        """Its rows are those of the residual, and lie with the same blocks."""
        self.page = page
        self.timeline = Timeline(machine, launch.timeline, page.names.count)
        self.columns = Columns(machine, launch.column_count, launch.columns, launch.sequences, advance_of(machine))
        self.ring = Ring(machine)
        self.linear = Matvec(self.columns, self.ring, launch.weights, self.timeline)
        adjustments = Adjustments(self.columns, launch, self.matrices.head)
        host = HostWords(self.columns, launch)
        filters = Filters(self.exchange, adjustments, launch.weighed)
        self.sampler = Sampler(
            self.linear.adding, self.exchange, self.shape.vocab, self.timeline, adjustments, filters, host
        )
        self.tokens: Tokens = Tokens(self.columns, launch, rows)
        if config.block is not None:
            slots = launch.kv_pages * machine.plan.page_size
            self.tokens = BlockTokens(self.columns, launch, config.block.mask, launch.known_rows, slots)
        elif machine.plan.drafts:
            self.tokens = VerifiedTokens(self.columns, launch, rows, adjustments)
        self.lists: tuple[MadeList, ...] = ()
        """Those that are made on the device in a step."""
        self.phase = Phases(machine, self.exchange, self.timeline, page.names, launch.progress)

    @ch.inline
    def set_up(self) -> None:
        """Barriers, cursors, and every column's first token."""
        machine = self.machine
        self.tokens.declare()
        for made in self.lists:
            made.declare()
        ch.comment("barriers, and every column's first token")
        with ch.if_(machine.thread == 0):
            self._initialise()
        self.tokens.take_first()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by any role
        self.ring.start()
        with machine.consumer:
            self.exchange.start()

    @ch.function
    def _initialise(self) -> None:
        """By one thread: set all barriers up. A block barrier must follow before anyone uses them."""
        parts: tuple[Any, ...] = (self.ring, self.linear, self.tokens, self.exchange, *self.lists)
        for part in parts:
            part.initialise()
        prim.mbarrier_fence_init()

    def begin_epochs(self, step: Any) -> None:
        """The first of the step's exchange epochs, in the roles that wait for them and that publish."""
        first = self.launch.epoch + step * ch.named("STEP_EPOCHS", epochs_of_step(self.page.names.layers))
        self.step_epoch = self._epoch("step_epoch", first)

    def _epoch(self, name: str, value: ch.Expr) -> ch.Expr:
        return ch.roles_const((self.machine.consumer, self.machine.adder), ty.u32, value, name)

    def emit_head(self, step: Any, epoch: ch.Expr) -> None:
        """Logits of the hidden vector of an epoch, and the next token of every column; left out for tokens whose logits
        nobody wants."""
        head = self.table.head
        hidden = self.normalised(head.input, epoch, self.places(head))
        self.start_sampling()
        for line in self.page.once:
            with self.phase(line.text):
                if isinstance(line, Multiply):
                    assert line.waits == hidden.waits, line
                    matrix, wanted = self.matrices[line.product], self.needs_head(step)
                    self.linear(matrix, hidden, self.take_logits(step), when=wanted)
                else:
                    self.choose(step)

    def start_sampling(self) -> None:
        with self.machine.adder:
            self.sampler.start()

    def choose(self, step: Any) -> None:
        """Every column's next token, in the region `chosen`."""
        with self.machine.adding():
            self.sampler.lay_down()
        with self.machine.consumer:
            self.sampler.choose(self.step_epoch + (self.page.names.layers + 1), step)
            self.timeline.stamp_here("done")

    @ch.function
    def publish_embeddings(self, vector: Vector, norm: NormWeights, multiplier: float = 1.0) -> None:
        """In the consumer role: the embeddings of the step's tokens, times the multiplier, become the residual, and are
        published as every hidden vector is. A lane has a row of a column, of the block's M-tiles in turn; whole warps
        share M-tiles."""
        begin = self.onto_residual(vector, norm, self.step_epoch, multiplier, is_first=True)
        for rows, row in self.rows_of_residual():
            begin(replace(rows, sum=functools.partial(self._embedded, rows.column, row, rows.is_own)))

    @ch.inline
    def rows_of_residual(self) -> Iterator[tuple[Rows, Any]]:
        """In the consumer role: the block's rows of the residual, a lane's in turn, and which of all each is; their
        sums are nothing."""
        machine, matrix, tokens = self.machine, self.residual, self.columns.limit
        height = matrix.tile_rows
        of_wave = ch.named("WAVE_VALUES", height * tokens)
        count = matrix.waves * of_wave
        with ch.for_(machine.thread, round_up(count, 32), machine.consumer_threads, unroll=1, name="place") as place:
            wave = place // of_wave
            column = place // height % tokens
            row = place % height
            m_tile = matrix.m_tile(wave, matrix.position(machine.block))
            is_own = (place < count) & (m_tile < matrix.m_tiles) & (column < self.columns.count)
            there = matrix.of_all(ch.minimum(m_tile, matrix.m_tiles - 1), machine.rank)
            yield Rows(there, wave, row, column, is_own, 0, lambda: 0.0, height), there * height + row

    @ch.inline
    def _embedded(self, column: Any, row: Any, when: Any) -> Any:
        """A row of the embedding of a column's token; those that there are not are zero in memory."""
        embedded = ch.var(ty.f32, 0.0)
        with ch.if_(when):
            embedded.set(prim.bf16_to_f32(self.tokens.embedding(column)[row]))
        return embedded

    def normalised(self, vector: Vector, epoch: ch.Expr, places: ch.Expr | None, is_normed: bool = True) -> Prologue:
        """RMSNorm of a vector that is published times its weights. places: of `places`. is_normed: else the vector
        itself; see `InverseRms`."""
        scale = replace(self.inverse_rms(vector, epoch), is_normed=is_normed)
        return Slices(self.columns, self.exchange.at(vector.name, epoch), vector.published, places, scale)

    def inverse_rms(self, vector: Vector, epoch: ch.Expr) -> InverseRms:
        """1/rms of a vector beside which squares are published."""
        return InverseRms(self.columns, self.squares_of(vector, epoch), vector.elements, self.config.rms_norm_eps)

    def squares_of(self, vector: Vector, epoch: ch.Expr) -> PublishedSquares:
        """The squares beside a vector."""
        return PublishedSquares(self.columns, self.exchange.at(vector.squares, epoch), self.residual.all_m_tiles)

    def onto_residual(
        self,
        vector: Vector | None,
        norm: NormWeights,
        epoch: ch.Expr,
        multiplier: float = 1.0,
        *,
        is_first: bool = False,
        biases: Biases | None = None,
        tap: Tap | None = None,
    ) -> PublishedRows:
        """Rows with their biases times the multiplier added to the residual, which is published as `vector`, times
        these weights, and kept where there is a tap."""
        assert vector is not None
        into, squares = self.exchange.at(vector.name, epoch), self.squares_of(vector, epoch)
        return AddResidual(self.machine, into, squares, norm, multiplier, is_first, biases, tap, self.fixed)

    @property
    def fixed(self) -> Fixed | None:
        """Of what drafts blocks: the columns of tokens that are known."""
        if self.config.block is None:
            return None
        assert isinstance(self.tokens, BlockTokens)
        return Fixed(self.tokens.is_known, NormWeights(self.launch.known_norm))

    def places(self, product: Product, layer: Any = None) -> Any:
        """Where a matrix has the elements of its input; None where they are in order."""
        if not (product.is_placed and self.config.is_ordered(product.name)):
            return None
        return self.launch.places + self.table.places_row(product, layer) * self._places_row

    @property
    def _places_row(self) -> int:
        return places_shape(self.config)[1]

    def needs_head(self, step: Any) -> Any:
        """Whether somebody wants the logits of a step, or what is sampled from them."""
        return (step >= self.launch.head_from) | (self.launch.logits != None)  # noqa: E711 (a device comparison)

    def take_logits(self, step: Any) -> Epilogue:
        """Logits to who wants them, and to the sampler."""

        @ch.inline
        def finish(rows: Rows) -> None:
            launch, vocab = self.launch, self.sampler.vocab
            logit = ch.const(ty.f32, self._logit(rows.sum()), name="logit")
            token = rows.m_tile * M_TILE_ROWS + rows.row
            with ch.if_(rows.is_own):
                with ch.if_((launch.logits != None) & (token < vocab)):  # noqa: E711
                    row = ty.u64(step * self.columns.limit + rows.column)
                    launch.logits[row * vocab + ty.u64(token)] = logit
                self.sampler.consider(rows, logit)

        return finish

    def _logit(self, row_sum: Any) -> Any:
        divisor, cap = self.config.logit_divisor, self.config.logit_soft_cap
        scaled = row_sum if divisor == 1 else row_sum * (1.0 / divisor)
        return scaled if cap is None else prim.tanh_f32(scaled * (1.0 / cap)) * cap

    def norm(self, index: Any) -> NormWeights:
        """The weights of a norm by its number."""
        return self._norm_weights(self.launch.norms, index)

    def _norm_weights(self, rows: Any, index: Any) -> NormWeights:
        return NormWeights(rows + index * self.machine.hidden, self.config.norms.plus_one)
