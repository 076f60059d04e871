"""jinja2 as chat templates know it from transformers, with a bound on its work. The only module that imports jinja2."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 5_000_000
"""Calls and turns of loops that one conversation may cost: seconds. It is a count, so the same record always fails."""
MAX_MEMORY_BYTES = 1 << 30
"""Memory that one conversation may cost, besides 32 bytes for each character that it may write."""
_LIMIT = threading.Lock()
"""Held while the limit on memory is changed, which is one for all threads of the process."""
_MAX_BITS = 4_096
_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Block)
"""What a template renders into a string first, so that the place of a part in the text is not known yet."""


class RenderError(Exception):
    """The template does not render a conversation. The message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation.

    Args:
        spans: where each ``{% generation %}`` block lies in `text`: (start, stop) in characters, ascending.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers gives templates, where long loops, numbers and repeated strings are refused.

    Args:
        date: what ``strftime_now`` formats; None if a template must not ask for it.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, date: datetime | None, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Steps, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["namespace"] = _Names
        if date is not None:
            self.globals["strftime_now"] = date.strftime
        self._max_characters = max_characters
        self._steps = self._length = 0
        self._spans: list[tuple[int, int]] = []

    def call(self, context: Any, obj: Any, /, *args: Any, **keywords: Any) -> Any:
        """Call a function of the template, and count it."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise RenderError(f"the template needs more than {MAX_STEPS:,} steps")
        return super().call(context, obj, *args, **keywords)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply, unless the result would be huge: nothing interrupts such an operation."""
        bits = items = 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        elif operator == "*":
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                items = len(sequence) * count
        if bits > _MAX_BITS or items > self._max_characters:
            raise RenderError(f"the template makes a huge value with {operator!r}")
        return super().call_binop(context, operator, left, right)

    def render(self, template: Template, values: Mapping[str, Any]) -> Rendered:
        """Render one conversation.

        Raises:
            RenderError: the template fails, does not end, or writes more than `max_characters`.
        """
        self._steps = self._length = 0
        self._spans = []
        pieces = []
        try:
            with _bounded_memory(MAX_MEMORY_BYTES + 32 * self._max_characters):
                for piece in template.generate(values):
                    pieces.append(piece)
                    self._length += len(piece)
                    if self._length > self._max_characters:
                        raise RenderError(f"the template writes more than {self._max_characters:,} characters")
        except (RenderError, MemoryError):
            raise
        except Exception as error:  # whatever a template does wrong
            raise RenderError(f"{type(error).__name__}: {error}"[:500]) from error
        return Rendered("".join(pieces), tuple(self._spans))

    def note(self, length: int) -> None:
        """Note a span that begins where the text ends now."""
        self._spans.append((self._length, self._length + length))


@contextlib.contextmanager
def _bounded_memory(num_bytes: int) -> Iterator[None]:
    """Refuse memory beyond what this process has now and `num_bytes` more. Costs some 15 us on a busy machine.

    A template can make strings in more ways than could be intercepted: filters, methods of strings, ``~``, blocks.

    Raises:
        RenderError: more was asked for.
        MemoryError: more was asked for than this process may have.
    """
    with _LIMIT:
        given, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space() + num_bytes
        if limit < num_bytes or (given != resource.RLIM_INFINITY and given < limit):
            yield
            return
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        try:
            yield
        except MemoryError as error:
            raise RenderError(f"the template needs more than {num_bytes >> 20:,} MiB of memory") from error
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (given, most))


def _address_space() -> int:
    """Bytes that this process has mapped; a negative number where the system does not say."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux
        return -1
    try:
        return int(os.read(file, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)


class _Generation(Extension):
    """The block ``{% generation %}``: what a model is to learn."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Any) -> str:
        text: str = caller()
        assert isinstance(self.environment, Sandbox)
        self.environment.note(len(text))
        return text


class _Steps(Extension):
    """Counts the turns of loops: each begins with a call."""

    def tick(self) -> None:
        """Nothing: the sandbox counts calls."""

    def count_in(self, loop: nodes.For) -> None:
        loop.body.insert(0, nodes.ExprStmt(self.call_method("tick")).set_lineno(loop.lineno))


class _Names(Namespace):
    """``namespace`` without attributes of Python's own."""

    def __init__(*args: Any, **keywords: Any) -> None:
        self, *given = args
        Namespace.__init__(self, *given, **keywords)
        attributes = object.__getattribute__(self, "_Namespace__attrs")
        if any(str(name).startswith("_") for name in attributes):
            raise SecurityError("a name of a namespace begins with an underscore")

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a name of a namespace begins with an underscore")
        super().__setitem__(name, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """What a template's text says before it is rendered.

    Args:
        literals: all text that it may write of its own.
        names: the variables and functions that it reads.
        has_spans: there is a ``{% generation %}`` block.
        is_nested: there is one in a macro, or in another place whose text is made before it is written.
    """

    literals: tuple[str, ...]
    names: frozenset[str]
    has_spans: bool
    is_nested: bool


def parsed(sandbox: Sandbox, source: str) -> tuple[Template, Syntax]:
    """The template, ready to be rendered.

    Raises:
        TemplateError: it is not a template.
    """
    tree = sandbox.parse(source)
    found = list(_generations(tree))
    syntax = Syntax(
        literals=(
            *(node.data for node in tree.find_all(nodes.TemplateData)),
            *(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)),
        ),
        names=frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"),
        has_spans=bool(found),
        is_nested=any(found),
    )
    steps = sandbox.extensions[_Steps.identifier]
    assert isinstance(steps, _Steps)
    for loop in tree.find_all(nodes.For):
        steps.count_in(loop)
    with _bounded_memory(MAX_MEMORY_BYTES):  # jinja2 computes what is constant now, and leaves what fails for later
        code = sandbox.compile(tree)
    return Template.from_code(sandbox, code, sandbox.make_globals(None), None), syntax


def _generations(node: nodes.Node, is_buffered: bool = False) -> Iterator[bool]:
    """For each generation block below a node, whether its text is made before it is written."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.CallBlock):
            target = child.call.node
            if isinstance(target, nodes.ExtensionAttribute) and target.identifier == _Generation.identifier:
                yield is_buffered
        is_loop = isinstance(child, nodes.For) and child.recursive
        yield from _generations(child, is_buffered or is_loop or isinstance(child, _BUFFERED))
