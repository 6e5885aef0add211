"""`LLM`: a model that is asked. Text or ids in; text, ids, finish reasons and timings out.

Joins the parts: checkpoint, tokenizer, chat template, generated kernel, device, engine. Each is told what to do from
here and knows nothing of this module.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from inspect import cleandoc
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.options import described, takes
from cheetah.printable import shown
from cheetah.runtime.asked import Asked
from cheetah.runtime.calls import (
    conversations_of,
    missing_method,
    own_names,
    params_for,
    progress_of,
    prompt_of,
    prompts_of,
    refuse_others,
)
from cheetah.runtime.checked_options import assembly_options, check_options, speculation_in
from cheetah.runtime.device import say_to_stderr
from cheetah.runtime.draft_models import drafting_model, opened_draft_model
from cheetah.runtime.engine.banned_sequences import BannedSequences
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.engine.shared import SharedEngine
from cheetah.runtime.engine.watching import NewWatcher
from cheetah.runtime.familiar_tokenizer import FamiliarTokenizer
from cheetah.runtime.metrics import Metric, engine_metrics
from cheetah.runtime.options import LoadOptions
from cheetah.runtime.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics, RequestOutput, StreamPiece
from cheetah.runtime.sampling import SamplingParams, sampling_of, sampling_of_checkpoint
from cheetah.runtime.startup import process_seconds, stage_lines
from cheetah.runtime.text.chat import Message
from cheetah.runtime.text.grammars import Grammars
from cheetah.runtime.text.harmony import CHANNEL, Channels, NewChannels
from cheetah.runtime.text.pieces import collect
from cheetah.runtime.text.prompts import Prompt, Prompts
from cheetah.runtime.text.tokenizer import Tokenizer
from cheetah.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cheetah.runtime.assembly.assemble import Assembly
    from cheetah.runtime.checkpoint.loading import Checkpoint


POOLINGS = ("last", "mean")
"""How an embedding is made of the hidden states of a prompt's tokens."""

CHAT_NAMES = (
    "chat_template_content_format lora_request max_new_tokens max_tokens mm_processor_kwargs params priority "
    "temperature"
).split()
"""What other libraries' calls take that is no variable of a template."""

OnePrompt: TypeAlias = Prompt | Mapping[str, Any]
Several: TypeAlias = list[str] | list[list[int]] | list[Mapping[str, Any]] | list[Prompt]
"""Of prompts; `list` alone, since a sequence of ids is one prompt."""
ForSeveral: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""The parameters of all, or those of each."""


class LLM:
    """A language model on a device, with its generated kernel. Close it, or use `with`.

    Several threads may use it at a time: their requests are decoded together, up to `batch`, the others wait in line,
    and each gets what it asked for (device pycuda refuses threads that did not open it). After Ctrl-C it works on; the
    interrupted request has given its place up.

    model: a folder, a hub id, "demo", or "random:PRESET".
    {options}

    Memory is computed, and refused if it does not fit, before anything is allocated.
    """

    @takes(LoadOptions, own_names)
    def __init__(self, options: LoadOptions) -> None:
        watch = Stopwatch()
        watch.add("Python and what was done before", process_seconds())
        from cheetah.runtime.assembly.assemble import assemble_with
        from cheetah.runtime.checkpoint.loading import open_checkpoint

        check_options(options)
        with watch("open the checkpoint"):
            checkpoint = open_checkpoint(
                options.model,
                options.revision,
                options.local_files_only,
                tie_word_embeddings=options.tie_word_embeddings,
                sparse=options.sparse,
            )
        checkpoint.check_quantization(options.quantization)
        if options.lora is not None:
            from cheetah.runtime.checkpoint.lora import with_adapter

            with watch("adapter"):
                checkpoint = with_adapter(checkpoint, options.lora)
        self.name, self.config = checkpoint.name, checkpoint.config
        self.seed, self._quiet, self._requests = options.seed, options.quiet, count()
        with watch("tokenizer"):
            self.prompts = Prompts.of(
                checkpoint, options.tokenizer, options.chat_template, options.messages_have_special_tokens
            )
        self.tokenizer = self.prompts.tokenizer
        self._grammars = Grammars(self.tokenizer, self.config.vocab_size)
        self._defaults, notes = sampling_of_checkpoint(
            checkpoint.generation_config, checkpoint.eos_token_id, options.seed
        )
        if not options.quiet:
            _print_notes(checkpoint, notes, self.tokenizer)
        with watch("open the draft model"):
            drafts = opened_draft_model(options, checkpoint)
        self._assembly = assemble_with(checkpoint, assembly_options(options, self.config, watch, drafts), drafts)
        self.manifest = self._assembly.manifest
        self.memory = self._assembly.memory
        self.max_context = self._assembly.launcher.cache.context
        self.engine = SharedEngine(self._new_engine(options))
        self.prefix_cache = self.engine.engine.prefixes
        if options.verbose:
            watch.add("all, since the process began", process_seconds())
            for line in stage_lines(watch):
                say_to_stderr(line)

    def _new_engine(self, options: LoadOptions) -> Engine:
        made = self._assembly
        cache = made.launcher.cache
        # A window leaves prefixes behind; and none is of use without the states of their ends, where there are some.
        states = cache.pool.states
        keeps_prefixes = options.prefix_cache and made.launcher.window is None and bool(states.kept or not states.count)
        return Engine(
            made.launcher,
            options.launch_steps,
            PrefixCache(cache.pool, cache.page_size) if keeps_prefixes else None,
            made.prompts,
            options.max_num_batched_tokens if options.enable_chunked_prefill else 0,
            made.solo,
            made.hosts_logits_buffer,
            made.passes,
            speculation_in(options),
            None if made.drafts is None else drafting_model(made),
        )

    @overload
    def generate(
        self, prompts: OnePrompt, sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True, **others: Any
    ) -> RequestOutput: ...
    @overload
    def generate(
        self, prompts: Several, sampling_params: ForSeveral = None, *, use_tqdm: bool = True, **others: Any
    ) -> list[RequestOutput]: ...
    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True, **others: Any
    ) -> RequestOutput | list[RequestOutput]:
        """The completions of a prompt (text, or token ids as they are), or of each of a list of prompts.

        A prompt may also be {"prompt": text} or {"prompt_token_ids": ids}. sampling_params: for all, or a list with
        those of each prompt. A list is checked whole before its first prompt runs; up to `batch` completions run
        together, and when one ends the next takes its place. use_tqdm: a bar of what is done, on standard error where
        that is a terminal, of more than one prompt.
        """
        refuse_others("generate", others)
        several, is_one = prompts_of(prompts)
        given = [(prompt if isinstance(prompt, str) else None, self.prompts.encode(prompt)) for prompt in several]
        outputs = self._collect(given, sampling_params, use_tqdm)
        return outputs[0] if is_one else outputs

    def stream(self, prompt: OnePrompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """The completions of a prompt piece by piece, as they are made. Mistakes in the request are raised at once.

        With a batch of 1 another request of the same thread ends an unfinished stream: its next piece is an error, and
        those of other threads are waited for. With more they go on side by side, each when any of them is asked for its
        next piece; a stream that nobody wants any more gives its place up when it is closed or collected.
        """
        return self._stream(self.prompts.encode(prompt_of(prompt)), sampling_params)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling_params: ForSeveral = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]: ...
    def chat(
        self, messages: Any, sampling_params: Any = None, *, use_tqdm: bool = True, **template: Any
    ) -> RequestOutput | list[RequestOutput]:
        """The model's next message in a conversation: [{"role": "user", "content": "..."}, ...]; or in each of a list.

        `template`: tools, documents, add_generation_prompt (True), continue_final_message, and what else the chat
        template knows, such as enable_thinking, also as chat_template_kwargs={...}; chat_template to use another one.
        The rendered conversation is the output's `prompt`.

        Of a model that writes channels (gpt-oss) `text` is what is for the reader, `reasoning` what it thought, and
        `tool_calls` are its calls; with skip_special_tokens=False, or structured outputs, all stays text.
        """
        conversations, is_one = conversations_of(messages)
        given = [self._render(conversation, template) for conversation in conversations]
        outputs = self._collect(given, sampling_params, use_tqdm, self._channels_of(template))
        return outputs[0] if is_one else outputs

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[StreamPiece]:
        """Like `chat` of one conversation, piece by piece as `stream`."""
        return self._stream(self._render(messages, template)[1], sampling_params, self._channels_of(template))

    def get_tokenizer(self) -> FamiliarTokenizer:
        """The checkpoint's tokenizer, by the names that transformers' have. CheetahError if there is none."""
        if self.tokenizer is None:
            raise CheetahError(f"{self.name} has no tokenizer (no tokenizer.json, or tokenizer=False)")
        return FamiliarTokenizer(self.prompts, self.tokenizer)

    def prepare_structured_outputs(self) -> None:
        """Makes what the first request with structured outputs would wait for, where there can be such requests."""
        self._grammars.prepare()

    def reset_prefix_cache(self) -> bool:
        """Forgets the pages that are kept for later prompts; they are read again. True: whose completions run keep
        their pages."""
        self.engine.check_open()
        self.engine.engine.reset_prefixes()
        return True

    @property
    def assembly(self) -> Assembly:
        """Kernels, buffers and the device, for tools that measure."""
        return self._assembly

    def get_metrics(self) -> list[Metric]:
        """What the engine is doing and has done, by the names of a server's /metrics."""
        return engine_metrics(self.engine.engine.load())

    def score(self, ids: Prompt, *others: Any) -> npt.NDArray[np.float32]:
        """The logits of every position, float32 [len(ids), vocab]: row i is for the token after ids 0 .. i."""
        if others:
            raise CheetahError("score takes one prompt and gives its logits: to compare texts, take embed of each")
        token_ids = self.prompts.encode(ids)
        self.engine.check_open()
        self._assembly.launcher.cache.check_fits(len(token_ids))
        return self.engine.score(token_ids, self._assembly.logits_buffer())

    def download_cache(self) -> npt.NDArray[Any]:
        """The pool of keys and values as it is: bits of bf16 (uint16), or codes of e4m3 (uint8), [layers, pages, 2,
        kv_heads, page_size, head_dim]; NaN where nothing was ever cached."""
        self.engine.check_open()
        pool = self.manifest.buffer("kv")
        return self._assembly.buffers["kv"].download(np.uint16 if pool.dtype == "bf16" else np.uint8, tuple(pool.shape))

    @overload
    def embed(
        self, prompts: OnePrompt, *, pooling: str = "last", normalize: bool = True, **others: Any
    ) -> EmbeddingRequestOutput: ...
    @overload
    def embed(
        self, prompts: Several, *, pooling: str = "last", normalize: bool = True, **others: Any
    ) -> list[EmbeddingRequestOutput]: ...
    def embed(
        self, prompts: Any, *, pooling: str = "last", normalize: bool = True, **others: Any
    ) -> EmbeddingRequestOutput | list[EmbeddingRequestOutput]:
        """A vector for a prompt, `output.outputs.embedding`, float32 [hidden], or for each of a list.

        It is the last layer's output behind the last norm. pooling: that of the "last" token, or the "mean" over all.
        normalize: to length 1. Prompts are as those of `generate`; those of a list are read together, as far as a pass
        has room. CheetahError where there are no passes (`prompt_passes`).
        """
        refuse_others("embed", others)
        if pooling not in POOLINGS:
            raise CheetahError(f"pooling={shown(pooling)}: expected one of {', '.join(POOLINGS)}")
        self.engine.check_open()
        several, is_one = prompts_of(prompts)
        ids = [self.prompts.encode(prompt) for prompt in several]
        for one in ids:
            self._assembly.launcher.cache.check_fits(len(one))
        found = self.engine.embed(ids, is_mean=pooling == "mean")
        outputs = [
            EmbeddingRequestOutput(prompt if isinstance(prompt, str) else None, own, EmbeddingOutput(vector))
            for prompt, own, vector in zip(several, ids, map(_unit, found) if normalize else found, strict=True)
        ]
        return outputs[0] if is_one else outputs

    def ask(self, ids: Sequence[int], params: SamplingParams) -> Request:
        """What `params` asks for behind a prompt of these ids, with the checkpoint's defaults, checked: for who drives
        `engine` otherwise than this class does."""
        self.engine.check_open()
        self.prompts.check(params)
        ids = ids[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else ids
        cache = self._assembly.launcher.cache
        cache.check_fits(len(ids))
        vocab_size = self.config.vocab_size
        banned = self.prompts.ids_of_words(params.bad_words)
        sampling = sampling_of(params, self._defaults, vocab_size, [ids[0] for ids in banned if len(ids) == 1])
        watchers = self._watchers(params, sampling.stop_ids, [ids for ids in banned if len(ids) > 1])
        room = cache.context - len(ids) + 1  # the last token that is made needs no place in the cache
        request = Request(
            tuple(ids),
            params.max_tokens or room,
            sampling,
            params.min_tokens,
            params.n,
            watchers,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            speculates=params.speculation,
            prediction=self._prediction(params),
            params=params,
        )
        self.engine.check(request)
        return request

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        """The ids of what a completion is thought to be, where that is of use. As many as a context has."""
        if not params.prediction or not params.speculation or not self._assembly.launcher.verifies:
            return ()
        return self.prompts.encode(params.prediction, add_special_tokens=False)[: self.max_context]

    def _watchers(
        self, params: SamplingParams, end_ids: Sequence[int], banned: Sequence[Sequence[int]]
    ) -> tuple[NewWatcher, ...]:
        """What follows each completion token by token: `banned` sequences, and what its text shall be."""
        found: list[NewWatcher] = []
        if banned:
            found.append(partial(BannedSequences, banned, self.config.vocab_size))
        if params.structured_outputs is not None:
            found.append(self._grammars.watcher(params.structured_outputs, end_ids))
        return tuple(found)

    def close(self) -> None:
        """Frees the device's memory. The LLM cannot be used afterwards; a second call does nothing."""
        self.engine.close()
        self._assembly.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request has that leaves everything open: the checkpoint's, of its generation_config.json."""
        own = self._defaults
        return SamplingParams(
            temperature=own.temperature,
            top_k=own.filters.top_k,
            top_p=own.filters.top_p,
            min_p=own.filters.min_p,
            repetition_penalty=own.penalties.repetition,
        )

    if not TYPE_CHECKING:  # which then knows what an LLM has

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_method(name)

    def __repr__(self) -> str:
        device, batch = self._assembly.device.describe().backend, self.engine.engine.launcher.batch
        return f"LLM({self.name!r}, device={device!r}, batch={batch}, max_context={self.max_context})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        """A conversation as text and as ids."""
        variables = _variables(template)
        known_elsewhere = {name: variables.pop(name) for name in CHAT_NAMES if name in variables}
        refuse_others("chat", known_elsewhere)
        self.prompts.check_shown(variables)
        return self.prompts.render(messages, **variables)

    def _channels_of(self, template: Mapping[str, Any]) -> NewChannels | None:
        """What tells the channels of an answer apart, where a conversation's template says that there are some."""
        variables = _variables(template)
        chosen = variables.get("chat_template") or self.prompts.chat_template
        is_so = self.prompts.templates.mentions(CHANNEL, chosen)
        return partial(Channels, bool(variables.get("tools"))) if is_so else None

    def _collect(
        self,
        given: Sequence[tuple[str | None, tuple[int, ...]]],
        sampling_params: Any,
        use_tqdm: bool,
        new_channels: NewChannels | None = None,
    ) -> list[RequestOutput]:
        """All completions of all prompts, each text (if it was one) and ids, decoded together."""
        arrived, every = time.time(), params_for(sampling_params, len(given))
        requests = [self._asked(ids, params, new_channels) for (_, ids), params in zip(given, every, strict=True)]
        found: list[list[StreamPiece]] = [[] for params in every for _ in range(params.n)]
        moments: list[list[float]] = [[] for _ in found]
        with progress_of(len(found), use_tqdm and len(given) > 1 and not self._quiet) as advance:
            for number, piece in self._pieces(requests):
                found[number].append(piece)
                moments[number].append(time.time())
                if piece.finished:
                    advance()
        completions, times = iter(found), iter(moments)
        outputs = []
        for (text, _), request in zip(given, requests, strict=True):
            own, ids = list(islice(completions, request.count)), request.prompt_ids
            made = tuple(map(collect, own))
            seen = [moment for one in islice(times, request.count) for moment in one]
            metrics = RequestMetrics(arrived, min(seen), max(seen), sum(len(one.token_ids) for one in made))
            name = str(next(self._requests))
            outputs.append(RequestOutput(text, ids, made, own[0][0].prompt_logprobs, name, metrics))
        return outputs

    def _stream(
        self, ids: tuple[int, ...], sampling_params: SamplingParams | None, new_channels: NewChannels | None = None
    ) -> Iterator[StreamPiece]:
        (params,) = params_for(sampling_params, 1)
        return self._pieces_of_one(self._asked(ids, params, new_channels))

    def _asked(self, ids: tuple[int, ...], params: SamplingParams, new_channels: NewChannels | None) -> Request:
        """What `ask` gives, of whose answers channels are told apart: by special tokens, so that who asks for these
        gets the text as it is."""
        if new_channels is None or not params.skip_special_tokens or params.structured_outputs is not None:
            return self.ask(ids, params)
        return replace(self.ask(ids, replace(params, skip_special_tokens=False)), new_channels=new_channels)

    def _pieces_of_one(self, request: Request) -> Iterator[StreamPiece]:
        # Closed here: a generator that only holds another one may not let go of it before it is collected.
        with closing(self._pieces([request])) as pieces:
            for _, piece in pieces:
                yield piece

    def _pieces(self, requests: Sequence[Request]) -> Generator[tuple[int, StreamPiece], None, None]:
        """(number of the completion among those of all requests, piece), as they are made, until all are finished."""
        ids = self.engine.submit(requests)
        try:
            asked = Asked(self.prompts, requests, ids)
            while asked.unfinished:
                for event in self.engine.wait(asked.unfinished):
                    if (found := asked.take(event)) is None:
                        continue
                    if found[1].finished:
                        self.engine.release([event.id])
                    yield found
        finally:
            self.engine.release(ids)


LLM.__doc__ = cleandoc(LLM.__doc__ or "").format(options=described(LoadOptions))


def _variables(template: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gives to its chat template."""
    variables = {**template, **(template.get("chat_template_kwargs") or {})}
    variables.pop("chat_template_kwargs", None)
    return variables


def _unit(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector with length 1."""
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def _print_notes(checkpoint: Checkpoint, of_sampling: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """One line on standard error for each guess that was made while loading."""
    for note in (*checkpoint.notes, *of_sampling):
        say_to_stderr(note)
    vocab_size = checkpoint.config.vocab_size
    if tokenizer is None:
        say_to_stderr(f"{checkpoint.name}: no tokenizer, token ids only")
    elif tokenizer.size > vocab_size:
        say_to_stderr(f"tokenizer.json has ids up to {tokenizer.size - 1}, the model's are below {vocab_size}")
