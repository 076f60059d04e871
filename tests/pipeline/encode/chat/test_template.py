"""Chat templates: what they are given, what is bounded, and what is refused before a record is read."""

from __future__ import annotations

import resource

import pytest

from tests.pipeline.encode.chat.chats import said, template
from tokshard.pipeline.encode.chat import sandbox
from tokshard.pipeline.encode.chat.records import conversation
from tokshard.pipeline.encode.chat.template import own_template, template_variables


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
        "{% for a in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{{ messages.append(1) }}",
        "{{ 'x'.center(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{% set n = 'x' * 99999 %}{{ n.replace('x', n) | length }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set n = namespace(x='x') %}{% for a in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for a in range(64) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace(__class__=1) %}",
    ],
)
def test_a_template_that_fails_or_does_too_much_refuses_the_record(text, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)  # to count to the real number takes ten seconds
    made = template(text, needs_spans=False)
    with pytest.raises(made.error):
        made.render(conversation(said("q", "a")).values)


@pytest.mark.parametrize(
    ("work", "times"),
    [
        *((work, 1_000) for work in ("r | sort", "r | list", "s | replace('x', 'y')", "s.upper()", "','.join(t)")),
        ("9 | string", 60_000),
    ],
)
def test_filters_and_methods_count_as_much_as_they_handle(work, times, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    made = template(
        "{% set r = range(9999) %}{% set s = 'x' * 999999 %}{% set t = ['x'] * 9999 %}{% for a in range(n) %}"
        "{% set n = namespace(x=" + work + ") %}{% endfor %}",
        needs_spans=False,
    )
    values = conversation(said("q", "a")).values
    made.render({**values, "n": 2})
    with pytest.raises(made.error, match="more than 100,000 steps"):
        made.render({**values, "n": times})


def test_a_template_that_needs_too_much_memory_is_told_so_and_the_limit_of_the_process_is_as_before():
    before = resource.getrlimit(resource.RLIMIT_AS)
    made = template("{{ 'x'.center(9999999999) }}", needs_spans=False)
    with pytest.raises(made.error, match=r"needs more than 1,\d+ MiB of memory"):
        made.render(conversation(said("q", "a")).values)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_template_of_a_tokenizer_is_its_file_then_its_configuration():
    one = {"name": "default", "template": "a"}
    assert own_template({"chat_template": "b"}, "file", "tok") == "file"
    assert own_template({"chat_template": "b"}, None, "tok") == "b"
    assert own_template({"chat_template": [one]}, None, "tok") == "a"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    assert template_variables(config) == {"bos_token": "<s>", "eos_token": "</s>"}
