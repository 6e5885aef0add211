"""Chat templates: where they come from, what they may use, and what they may not do."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from cheetah.errors import CheetahError
from cheetah.runtime.text.chat import ChatTemplates

LLAMA_LIKE = """\
{{- bos_token }}
{%- if not date is defined %}{% set date = strftime_now("%d %b %Y") %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|turn|>' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{{ date }}{% endif %}
"""
MESSAGES = [{"role": "user", "content": " Hi "}, {"role": "skip", "content": "no"}]


def templates(text: str, **more: str) -> ChatTemplates:
    return ChatTemplates({"default": text} | more, {"bos_token": "<s>"}, now=lambda: datetime(2024, 7, 26))


def test_a_llama_like_template_renders_with_a_pinned_date() -> None:
    assert templates(LLAMA_LIKE).render(MESSAGES) == "<s><|user|>Hi<|turn|><|assistant|>26 Jul 2024"
    assert templates(LLAMA_LIKE).render(MESSAGES, add_generation_prompt=False) == "<s><|user|>Hi<|turn|>"


# What templates of Qwen3 do: the last question is looked for backwards, thoughts before it are left out.
QWEN_LIKE = """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}{% set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and "</think>" in content and loop.index0 < ns.last %}
        {%- set content = content.split("</think>")[-1].lstrip("\n") %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\n\n</think>\n\n" }}{% endif %}
{%- endif %}
"""
# What templates of Mistral do: turns must alternate, the system's words go to the last question.
MISTRAL_LIKE = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system, turns = messages[0]["content"], messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- set asks = message["role"] == "user" %}
    {%- if asks != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
    {%- if asks %}
        {{- "[INST] " + (system + "\n\n" if loop.last and system is defined else "") + message["content"] + "[/INST]" }}
    {%- else %}{{ " " + message["content"]|trim + eos_token }}{% endif %}
{%- endfor %}
"""
CONVERSATION = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."},
    {"role": "user", "content": "Three?"},
]


def test_a_qwen_like_template_leaves_old_thoughts_out_and_takes_its_own_variables() -> None:
    rendered = templates(QWEN_LIKE).render(CONVERSATION)
    turns = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
    turns += "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == turns
    silent = templates(QWEN_LIKE).render(CONVERSATION, enable_thinking=False)
    assert silent == turns + "<think>\n\n</think>\n\n"
    assert templates("{{ messages[0].role }}").render(CONVERSATION, bos_token="not mine") == "user"


def test_a_mistral_like_template_and_turns_that_do_not_alternate() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = templates(MISTRAL_LIKE).render([system, *CONVERSATION])
    thought = CONVERSATION[1]["content"]
    assert found == f"<s>[INST] One?[/INST] {thought}[INST] Be brief.\n\nThree?[/INST]"
    with pytest.raises(CheetahError, match="chat template: roles must alternate"):
        templates(MISTRAL_LIKE).render(CONVERSATION[1:])


def test_tojson_keeps_characters_and_does_not_escape_html() -> None:
    template = templates("{{ tools | tojson }} {{ tools[0] | tojson(indent=1) }}")
    rendered = template.render(MESSAGES, tools=[{"é": "<&'>"}])
    assert rendered == '[{"é": "<&\'>"}] {\n "é": "<&\'>"\n}'


def test_blocks_take_their_line_with_them() -> None:
    text = "a\n  {% if true %}\nb\n  {% endif %}\nc"
    assert templates(text).render(MESSAGES) == "a\nb\nc"


def test_documents_and_eos_reach_the_template() -> None:
    assert templates("{{ documents[0] }}|{{ eos_token }}").render(MESSAGES, documents=["d"]) == "d|"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("line one\n{% if %}", "chat template, line 2"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update({}) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ undefined_name.x }}", "UndefinedError"),
        ("{% include 'other' %}", "chat template: "),
    ],
)
def test_what_a_template_may_not_do_is_one_error(text: str, message: str) -> None:
    with pytest.raises(CheetahError, match=message):
        templates(text).render(MESSAGES)


@pytest.mark.parametrize("messages", ["Hello", [], {"role": "user"}, [{"content": "x"}], ["x"]])
def test_messages_are_checked(messages: object) -> None:
    with pytest.raises(CheetahError, match="role"):
        templates(LLAMA_LIKE).render(messages)  # type: ignore[arg-type]


def files(folder: Path, **texts: str) -> dict[str, Path]:
    found = {}
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        found[name.replace("__", "/")] = path
    return found


def test_files_win_over_the_config_and_an_argument_over_all(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "config"}, {"name": "tool", "template": "tool"}]}
    only_config = ChatTemplates.from_files({}, config)
    assert only_config.render(MESSAGES) == "config" and only_config.render(MESSAGES, template="tool") == "tool"
    found = files(tmp_path, **{"chat_template.jinja": "file", "chat_templates__rag.jinja": "rag"})
    both = ChatTemplates.from_files(found, config)
    assert both.render(MESSAGES) == "file"
    assert both.render(MESSAGES, template="rag") == "rag" and both.render(MESSAGES, template="tool") == "tool"
    assert both.render(MESSAGES, template="{{ messages[0].role }}") == "user"


def test_no_default_template_says_what_there_is() -> None:
    with pytest.raises(CheetahError, match="no default chat template: pass chat_template"):
        ChatTemplates.from_files({}, {}).render(MESSAGES)
    with pytest.raises(CheetahError, match=r"it has rag, tool"):
        ChatTemplates({"tool": "", "rag": ""}).render(MESSAGES)


def test_a_template_is_given_as_text_as_a_file_or_by_its_name(tmp_path: Path) -> None:
    """What is none of these would be every prompt, word for word."""
    file, both = tmp_path / "tools.jinja", ChatTemplates({"default": "a", "rag": "b"})
    file.write_text("{{ messages[0].content }}")
    assert [both.given(one) for one in ("rag", "{{ 1 }}", str(file))] == ["rag", "{{ 1 }}", "{{ messages[0].content }}"]
    for wrong in ("tools.jinja", str(tmp_path), "x" * 5000, "a\0b"):
        with pytest.raises(CheetahError, match=r"no such file, and none of the checkpoint's \(default, rag"):
            both.given(wrong)


def test_a_config_entry_of_another_kind_is_refused() -> None:
    with pytest.raises(CheetahError, match="chat_template must be text"):
        ChatTemplates.from_files({}, {"chat_template": [{"name": "default"}]})


def test_templates_that_are_no_text_or_too_large_are_refused_with_their_file(tmp_path: Path) -> None:
    for name, content, message in (
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        ("chat_templates/tool.jinja", b"x" * 1_000_001, "has 1000001 bytes, at most 1000000 are read"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with pytest.raises(CheetahError, match=f"{name}: {message}"):
            ChatTemplates.from_files({name: path}, {})
