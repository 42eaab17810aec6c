"""Chat templates: what honest ones get, and that hostile ones end in a sentence, soon."""

import time

import pytest

from models.chat import ChatLimits, render_chat
from models.errors import ChatTemplateError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Größe <1>"}]
TIGHT = ChatLimits(seconds=0.3, memory_bytes=256 << 20, output_chars=100_000)


def test_plain_template():
    template = """
{%- for message in messages %}
{{ bos_token + message.role }}: {{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}
assistant:{{ eos_token }}
{% endif %}"""
    text = render_chat(template, MESSAGES, bos_token="<s>", eos_token="</s>")
    assert text == "<s>user: Hi\n<s>assistant: Größe <1>\nassistant:</s>\n"
    assert render_chat(template, MESSAGES, add_generation_prompt=False).endswith("<1>\n")


def test_helpers_of_transformers():
    assert render_chat("{{ messages | tojson }}", [{"role": "a", "n": "é<"}]) == '[{"role": "a", "n": "é<"}]'
    assert len(render_chat("{{ strftime_now('%Y-%m-%d') }}", MESSAGES)) == 10
    assert render_chat("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", MESSAGES) == "user"
    namespace = "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}"
    assert render_chat(namespace, MESSAGES) == "2"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", MESSAGES)


def test_long_conversations_render_in_time():
    messages = [{"role": "user", "content": "word " * 200}] * 500
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert len(render_chat(template, messages)) == 500 * 1004


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10**9) %}x{% endfor %}",
    "string product": "{{ 'x' * 10**10 }}",
    "string product unseen": "{% set x = 'x' * 10**10 %}",
    "list product": "{% set x = [0] * 10**10 %}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "digits": "{{ 10 ** 5000 }}",
    "format width": "{{ '%9999999999d' % 1 }}",
    "str.format width": "{{ '{:>9999999999}'.format(1) }}",
    "centre": "{{ 'x' | center(10**10) }}",
    "indent": "{{ 'x\n' | indent(10**10) }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "much output": "{% for a in range(99999) %}xxxxxxxxxx{% endfor %}",
    "deep parentheses": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5_000,
    "many lists": "{{ " + "[" * 2_000 + "]" * 2_000 + " }}",
    "attribute escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format escape": "{{ '{0.__class__.__mro__}'.format('') }}",
    "attr filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "global escape": "{{ raise_exception.__globals__['sys'] }}",
    "cycler escape": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at_all }}",
    "division": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_in_a_sentence(template):
    started = time.monotonic()
    with pytest.raises(ChatTemplateError) as caught:
        render_chat(template, MESSAGES, limits=TIGHT)
    assert time.monotonic() - started < 10  # 0.3 s of processor time; the rest is a busy machine
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_memory_is_bounded_apart_from_time():
    template = "{% set x = 'x' * (messages | length * 100 * 1024 * 1024) %}done"
    assert render_chat(template, MESSAGES, limits=ChatLimits(seconds=10)) == "done"
    with pytest.raises(ChatTemplateError, match="more memory"):
        render_chat(template, MESSAGES, limits=ChatLimits(seconds=10, memory_bytes=200 << 20))


@pytest.mark.parametrize("messages", [[{"content": "x"}], ["x"], [{"role": 7}], [{"role": "a", "content": object()}]])
def test_messages_have_to_be_messages(messages):
    with pytest.raises(ChatTemplateError):
        render_chat("x", messages)


def test_checkpoint_without_a_template():
    with pytest.raises(ChatTemplateError, match="without one"):
        render_chat(None, MESSAGES)  # pyright: ignore[reportArgumentType]


def test_long_inputs_are_refused():
    with pytest.raises(ChatTemplateError, match="up to 100"):
        render_chat("x" * 200, MESSAGES, limits=ChatLimits(input_chars=100))
