"""A checkpoint that drafts for another one: opened, and refused by name where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from cheetah.errors import CheetahError
from cheetah.plan.defaults import default_context
from cheetah.printable import shown
from cheetah.runtime.engine.block_drafts import BlockDrafts
from cheetah.runtime.engine.block_launches import BlockLauncher
from cheetah.runtime.engine.draft_head import DraftHead, FeatureStore
from cheetah.runtime.engine.draft_model import DraftModel
from cheetah.runtime.engine.draft_rounds import RoundLauncher
from cheetah.runtime.engine.kv_cache import PageCopy
from cheetah.runtime.options import LoadOptions
from cheetah.runtime.speculation import (
    BLOCK_METHODS,
    DFLASH,
    DRAFT_MODEL,
    DSPARK,
    EAGLE3,
    MTP,
    DraftModelAsked,
    draft_model_of,
    speculation_of,
)
from cheetah.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cheetah.runtime.assembly.assemble import Assembly
    from cheetah.runtime.checkpoint.loading import Checkpoint

TOKENIZER = "tokenizer.json"


def opened_draft_model(options: LoadOptions, target: Checkpoint) -> Checkpoint | None:
    """The checkpoint that drafts for `target`, if one shall. CheetahError where it cannot: another tokenizer, a shorter
    context."""
    from cheetah.runtime.checkpoint.drafters import open_drafter, open_mtp
    from cheetah.runtime.checkpoint.loading import open_checkpoint

    given = options.speculative_config
    if given is None or (asked := draft_model_of(given)) is None:
        return None
    if asked.tensor_parallel_size not in (None, options.tensor_parallel_size):
        raise CheetahError(
            f"speculative_config: draft_tensor_parallel_size is {shown(asked.tensor_parallel_size)}: what drafts is "
            f"shared out to as many GPUs as the model, {options.tensor_parallel_size}: leave it out"
        )
    where = asked.revision, options.local_files_only
    method = asked.method or _method_of_files(asked, options)
    if method == MTP:
        return _fitting(open_mtp(target, asked.model, *where), target, options)
    assert asked.model is not None
    if method in (EAGLE3, *BLOCK_METHODS):
        found = open_drafter(asked.model, target, *where)
        _check_method(found, method, asked.model, speculation_of(given).drafts)
    else:
        found = open_checkpoint(asked.model, *where)
    found.check_quantization(asked.quantization)
    if found.config.delta_layers:
        raise CheetahError(
            f"speculative_config: model {asked.model} remembers all tokens in states (Gated DeltaNet), also those that "
            f"were not right: give a model of attention alone"
        )
    return _fitting(found, target, options)


def _fitting(found: Checkpoint, target: Checkpoint, options: LoadOptions) -> Checkpoint:
    """What drafts; CheetahError where it has another context or tokenizer than the target."""
    context = options.max_context or default_context(target.config.max_position_embeddings)
    if target.config.window(context) is not None:
        raise CheetahError(
            f"speculative_config: model {found.name}: {target.name}'s window leaves keys behind that a draft model "
            f"reads: give a max_context within the window"
        )
    if (most := found.config.max_position_embeddings) < context:
        raise CheetahError(
            f"speculative_config: model {found.name} has room for {most} tokens, {target.name} for {context}: give "
            f"max_context={most} or less"
        )
    if options.tokenizer:
        _check_tokenizer(found, target)
    return found


def _method_of_files(asked: DraftModelAsked, options: LoadOptions) -> str:
    """By which method a checkpoint drafts, where that is not said."""
    from cheetah.models.config_json import load_source
    from cheetah.models.registry import drafting_method
    from cheetah.runtime.checkpoint.loading import RANDOM, found_folder

    assert asked.model is not None, "which is left out by a method that says so"
    if asked.model.startswith(RANDOM):
        kind = asked.model.removeprefix(RANDOM)
        return kind if kind in (EAGLE3, DSPARK) else DRAFT_MODEL
    with found_folder(asked.model, asked.revision, options.local_files_only) as folder:
        path = folder / "config.json"
        return (drafting_method(load_source(path)) if path.is_file() else None) or DRAFT_MODEL


def _check_method(found: Checkpoint, method: str, model: str, drafts: int) -> None:
    """CheetahError where what was opened drafts by another method, or fewer tokens."""
    block = found.config.block
    own = EAGLE3 if block is None else DSPARK if block.markov_rank else DFLASH
    if own != method:
        what = "is an EAGLE-3 head" if block is None else f"has {'a' if block.markov_rank else 'no'} Markov head"
        raise CheetahError(f"speculative_config: model {model} {what}: its method is {own}")
    if block is not None and drafts > block.drafts:
        raise CheetahError(
            f"speculative_config: num_speculative_tokens is {drafts}, model {model} drafts blocks of {block.drafts}: "
            f"give at most as many"
        )


def drafting_model(made: Assembly) -> DraftModel:
    """Launches of the second model of what was assembled, and of rounds of both."""
    drafts, handoff = made.drafts, made.handoff
    assert drafts is not None and handoff is not None
    alone = drafts.solo or drafts.launcher
    rounds = RoundLauncher(handoff, made.launcher, alone, drafts.launcher, made.known_rows)
    if isinstance(drafts.launcher, BlockLauncher):
        assert made.known_rows is not None
        _copy_beside(made, made.known_rows.copy_pages)
        return BlockDrafts(drafts.launcher, made.known_rows, rounds)
    if "features" in drafts.buffers:
        store = FeatureStore(drafts.buffers["features"], drafts.manifest.buffer("features").shape)
        _copy_beside(made, store.copy_pages)
        return DraftHead(drafts.launcher, alone, store, rounds, knows_all="token_ids" not in drafts.buffers)
    return DraftModel(drafts.launcher, alone, drafts.passes, rounds)


def _copy_beside(made: Assembly, copy: Callable[[Sequence[PageCopy]], None]) -> None:
    """Has what lies by the model's pages for another one be copied as its keys are."""
    for one in (made.launcher, made.prompts, made.solo, *made.passes):
        if one is not None:
            one.copied_beside = copy


def _check_tokenizer(drafts: Checkpoint, target: Checkpoint) -> None:
    """CheetahError names the first token that differs. Where one has no tokenizer, or both have the same file, there is
    nothing to compare."""
    files = [one.files.get(TOKENIZER) for one in (drafts, target)]
    if files[0] is None or files[1] is None or files[0].read_bytes() == files[1].read_bytes():
        return
    tokens = map(_tokens_of, (drafts, target))
    for number, (one, other) in enumerate(zip_longest(*tokens)):
        if one != other:
            raise CheetahError(
                f"speculative_config: model {drafts.name} has another tokenizer than {target.name}: token {number} is "
                f"{shown(one)} there and {shown(other)} here: give a model with the same tokenizer"
            )


def _tokens_of(checkpoint: Checkpoint) -> Iterator[str | None]:
    """Every token as the vocabulary writes it."""
    tokenizer = Tokenizer.from_files(checkpoint.files)
    return iter(()) if tokenizer is None else tokenizer.tokens()
