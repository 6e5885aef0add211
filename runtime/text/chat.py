"""Chat messages to prompt text, by the checkpoint's own template.

The template is Jinja text from the checkpoint and is not trusted: it runs in jinja2's immutable sandbox, set up as
Hugging Face does. Knows nothing of token ids; its output already holds the special tokens, so it is encoded without
adding any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cheetah.errors import CheetahError

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."} and whatever else the template understands."""

JINJA2_MINIMUM = (3, 1, 6)


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
                templates["default"] = path.read_text(encoding="utf-8")
            elif name.startswith("chat_templates/") and name.endswith(".jinja"):
                templates[Path(name).stem] = path.read_text(encoding="utf-8")
        return cls(templates, special_tokens, now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text for a conversation. `template`: the name of one of the checkpoint's, or Jinja text."""
        _check_messages(messages)
        compiled = self._compile(self._source(template))
        try:
            return str(
                compiled.render(
                    messages=[dict(message) for message in messages],
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
            )
        except CheetahError:
            raise
        except Exception as error:  # a template can fail in as many ways as a program
            raise CheetahError(f"chat template: {type(error).__name__}: {error}") from error

    def _source(self, template: str | None) -> str:
        if template is not None:
            return self.templates.get(template, template)
        if "default" in self.templates:
            return self.templates["default"]
        named = f" (it has {', '.join(sorted(self.templates))})" if self.templates else ""
        raise CheetahError(
            f"the checkpoint has no default chat template{named}: pass chat_template=..., or write the prompt yourself "
            "and use generate()"
        )

    def _compile(self, source: str) -> Any:
        import jinja2

        try:
            return _environment(self._now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheetahError(f"chat template, line {error.lineno}: {error.message}") from error


def _environment(now: Callable[[], datetime]) -> Any:
    """The sandbox with what Hugging Face's templates may use, and nothing else."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < JINJA2_MINIMUM:
        raise CheetahError(f"jinja2 {jinja2.__version__} has escapes from its sandbox: install jinja2 >= 3.1.6")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps without jinja2's escaping of <, >, & and '."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise CheetahError(f"chat template: {message}")


def _templates_of_config(entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    entries = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in entries):
        raise CheetahError("tokenizer_config.json: chat_template must be text, or a list of {name, template}")
    return {str(item["name"]): str(item["template"]) for item in entries}


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise CheetahError('chat() takes a list of messages: [{"role": "user", "content": "Hello"}]')
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise CheetahError(f'message {position}: expected {{"role": ..., "content": ...}}, found {message!r}')
