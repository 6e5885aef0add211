"""Chat messages to prompt text, by the checkpoint's own template.

The template is Jinja text from the checkpoint and is not trusted: it runs in jinja2's immutable sandbox, in a process
of its own with limits. Knows nothing of token ids; its output already holds the special tokens, so it is encoded
without adding any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError
from cheetah.printable import shown
from cheetah.runtime.text.guarded_process import GuardedProcess, Limits
from cheetah.runtime.text.marks import Marks
from cheetah.untrusted import parse_json, read_text

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."} and whatever else the template understands."""

TEMPLATE_BYTES = 1_000_000
"""Most bytes of a template: the longest of published models have 20,000."""

ARGUMENTS = 100_000
"""Most values among the arguments of a call."""

_PROCESS = GuardedProcess("chat template", {"work": "templates"}, Limits(3.0, 256_000_000, 4_000_000))
"""Renders every template: one process for all checkpoints, started with the first conversation."""


class ChatTemplates:
    """The chat templates of a checkpoint by name; `default` is the one used when none is asked for.

    `templates` maps names to Jinja text; `special_tokens` (bos_token, eos_token, ...) are handed to the template.
    `now` gives the date that templates print; pin it for output that does not change.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ):
        self.templates = dict(templates)
        self._special_tokens = {"bos_token": "", "eos_token": ""} | dict(special_tokens or {})
        self._now = now

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, Path],
        tokenizer_config: Mapping[str, Any],
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplates:
        """Templates of a checkpoint: `chat_template` of tokenizer_config.json, over it `chat_template.jinja` and
        `chat_templates/*.jinja` from `files` (by name relative to the checkpoint)."""
        templates = _templates_of_config(tokenizer_config.get("chat_template"))
        for name, path in sorted(files.items()):
            if name == "chat_template.jinja":
                templates["default"] = read_text(path, TEMPLATE_BYTES)
            elif name.startswith("chat_templates/") and name.endswith(".jinja"):
                templates[Path(name).stem] = read_text(path, TEMPLATE_BYTES)
        return cls(templates, special_tokens, now)

    def given(self, template: str) -> str:
        """What somebody who opens a model writes: Jinja text or the name of one of the checkpoint's as it is, of a file
        its text. CheetahError for what is none of these: a template without a brace shows no message."""
        if template in self.templates or "{" in template:
            return template
        if not os.path.isfile(template):  # which may be any text
            named = f" ({', '.join(sorted(self.templates))})" if self.templates else ""
            raise CheetahError(
                f"chat_template={shown(template)}: no Jinja text, no such file, and none of the checkpoint's{named}"
            )
        return read_text(Path(template), TEMPLATE_BYTES)

    def render(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        marks: Marks | None = None,
        **others: Any,
    ) -> str:
        """The prompt text for a conversation. `template`: the name of one of the checkpoint's, or Jinja text.
        continue_final_message: it ends with the last message's text, which the model is to go on from; give
        add_generation_prompt=False beside it. marks: what stands in the text wherever messages or variables read like a
        special token. others: what this template knows beside, such as enable_thinking of Qwen3's."""
        if continue_final_message and add_generation_prompt:
            raise CheetahError("continue_final_message=True goes on from the last message: add_generation_prompt=False")
        hide = marks.hide if marks is not None else lambda value: value
        plain = hide(_plain_messages(messages))
        variables = {
            **hide(others),
            "messages": plain,
            "tools": hide(tools),
            "documents": hide(documents),
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        question = {"source": self._source(template), "now": self._now().isoformat(), "variables": variables}
        text = str(_PROCESS.ask(question))
        return _up_to_message(text, plain[-1]["content"]) if continue_final_message else text

    def mentions(self, variable: str, template: str | None = None) -> bool:
        """Whether a template says anything of a variable. template: as of `render`."""
        return variable in self._source(template)

    def _source(self, template: str | None) -> str:
        source = self.templates.get("default") if template is None else self.templates.get(template, template)
        if source is not None and len(source) > TEMPLATE_BYTES:
            raise CheetahError(f"chat template: has {len(source)} characters, at most {TEMPLATE_BYTES} are taken")
        if source is not None:
            return source
        named = f" (it has {', '.join(sorted(self.templates))})" if self.templates else ""
        raise CheetahError(
            f"the checkpoint has no default chat template{named}: pass chat_template=..., or write the prompt yourself "
            "and use generate()"
        )


def _templates_of_config(entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    entries = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in entries):
        raise CheetahError("tokenizer_config.json: chat_template must be text, or a list of {name, template}")
    return {str(item["name"]): str(item["template"]) for item in entries}


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is text, and a tool call's arguments are an object."""
    if isinstance(messages, str | Mapping) or not messages:
        raise CheetahError('chat() takes a list of messages: [{"role": "user", "content": "Hello"}]')
    return [_plain_message(message, f"message {position}") for position, message in enumerate(messages)]


def _plain_message(message: Message, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CheetahError(f'{place}: expected {{"role": ..., "content": ...}}, found {shown(message)}')
    plain = {**message, "content": _text_of(message.get("content"), place)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, place) for call in _as_list(calls, f"{place}: tool_calls")]
    return plain


def _text_of(content: Any, place: str) -> str:
    """The text of a content: none is no text, parts stand in lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of_part(part, place) for part in _as_list(content, f"{place}: content"))


def _text_of_part(part: Any, place: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise CheetahError(f'{place}: content has a part {shown(kind)}: give {{"type": "text", "text": "..."}}')
    return text


def _plain_call(call: Any, place: str) -> dict[str, Any]:
    """A tool call whose arguments, which clients write as JSON in a text, are what it says: templates write it anew."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CheetahError(
            f'{place}: expected tool_calls of {{"function": {{"name", "arguments"}}}}, found {shown(call)}'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            data = arguments.encode("utf-8", "surrogatepass")
            arguments = parse_json(data, place, CheetahError, ARGUMENTS) if arguments else {}
        except CheetahError:
            raise CheetahError(
                f"{place}: the arguments of {function['name']} are no JSON: {shown(arguments)}"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _as_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise CheetahError(f"{place} is {shown(value)}: expected a list, or text")
    return list(value)


def _up_to_message(text: str, message: str) -> str:
    """The rendered text up to the end of the last message, as `transformers` cuts it: a template may strip messages."""
    stripped = message.strip()
    start = text.rfind(stripped)
    if start < 0:
        raise CheetahError("continue_final_message: the chat template does not show the last message as it is")
    whole = message.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else stripped)]
