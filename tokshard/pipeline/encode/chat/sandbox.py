"""jinja2 as chat templates know it from transformers, with a bound on its work. The only module that imports jinja2."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000
"""The most steps of one conversation: calls, filters and loop iterations. A call or filter also costs a step for each
item of a list that it handles, and for each KiB of text. It is a count, so the same record fails on every machine. A
step takes a few microseconds at most, and 8,000 turns of chat take some 40,000 steps."""
MAX_MEMORY_BYTES = 1 << 30
"""Memory limit of one conversation, besides 32 bytes for each character that it may write."""
_LIMIT = threading.Lock()
"""Held while the memory limit is changed, which all threads of the process share."""
_MAX_BITS = 4_096
_DRAWN = ("cycler", "joiner", "lipsum", "random")
"""Functions and a filter of jinja2 that draw at random or keep a state, which no chat template needs."""
_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Block)
"""Nodes that a template renders into a string first, so that the place of a part in the text is not known yet."""


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

    intercepted_binops = frozenset({"*", "**", "-"})

    def __init__(self, date: datetime | None, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, _Steps, "jinja2.ext.loopcontrols"],
            finalize=_printable,
        )
        self.filters = {name: self._counted(found) for name, found in self.filters.items() if name not in _DRAWN}
        self.filters["tojson"] = self._counted(_to_json)
        for name in _DRAWN:
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _Function(_raise)
        self.globals["namespace"] = _Names
        if date is not None:
            self.globals["strftime_now"] = _Function(date.strftime)
        self._max_characters = max_characters
        self._steps = self._length = 0
        self._spans: list[tuple[int, int]] = []

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that costs steps. An iterator that it returns has no text, which would be an address."""

        @functools.wraps(function)  # with the attribute that says what jinja2 passes first
        def counted(*args: Any, **keywords: Any) -> Any:
            self._count(1 + sum(map(_size, args)))
            found = function(*args, **keywords)
            if isinstance(found, Iterator):
                return _Items(found)
            self._count(_size(found))
            if isinstance(found, str) and len(found) > self._max_characters:
                raise RenderError(f"the template makes a text of more than {self._max_characters:,} characters")
            return found

        return counted

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise RenderError(f"the template needs more than {MAX_STEPS:,} steps")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or an item of this name."""
        return _named(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item, or an attribute of this name."""
        return _named(super().getitem(obj, argument))

    def call(self, context: Any, obj: Any, /, *args: Any, **keywords: Any) -> Any:
        """Call a function of the template, and count it."""
        if isinstance(obj, _Function):
            obj = obj.function
            self._count(1 + _size(getattr(obj, "__self__", None)) + sum(map(_size, args)))
        else:
            self._count(1)
        return super().call(context, obj, *args, **keywords)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply, unless the result would be huge: nothing interrupts such an operation. Sets have no fixed order."""
        if operator == "-":
            found = super().call_binop(context, operator, left, right)
            if isinstance(found, AbstractSet):
                raise RenderError("the template makes a set, whose order differs from process to process")
            return found
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
        except RenderError as error:
            line = _line(error, template)
            raise RenderError(f"{error}, in line {line} of the template" if line else str(error)) from error
        except MemoryError:
            raise
        except Exception as error:  # a template can fail in any way
            line = _line(error, template)
            place = f", in line {line} of the template" if line else ""
            raise RenderError(f"{type(error).__name__}: {error}"[:500] + place) from error
        return Rendered("".join(pieces), tuple(self._spans))

    def note(self, length: int) -> None:
        """Note a span that begins where the text ends now."""
        self._spans.append((self._length, self._length + length))


class _Function:
    """A function or method. It can be called, and has no text, which would be its address."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **keywords)

    def __repr__(self) -> str:
        raise RenderError("the template writes a function")


class _Items(Iterator[Any]):
    """An iterator that a filter returns. It has no text, which would be its address."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)

    def __repr__(self) -> str:
        raise RenderError("the template writes what a filter yields, without | list")


def _named(found: Any) -> Any:
    """A value, or a function without a text."""
    is_function = callable(found) and not isinstance(found, Undefined | Macro | _Function)
    return _Function(found) if is_function else found


def _size(value: Any) -> int:
    """Cost of handling a value, in steps."""
    if isinstance(value, str):
        return len(value) >> 10
    return len(value) if isinstance(value, list | tuple | dict | range) else 0


def _printable(value: Any) -> Any:
    """A value that a template writes, if its text is a function of the record.

    Raises:
        RenderError: it is an object of Python's or jinja's own, whose text may be an address.
    """
    if not isinstance(value, str) and (found := _foreign(value)) is not None:
        raise RenderError(f"the template writes a value of type {found}, expected text, a number, a list or an object")
    return value


def _foreign(value: Any) -> str | None:
    """The type of the first part of a value that is not JSON; None if there is none."""
    if value is None or isinstance(value, str | int | float | Undefined):
        return None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _foreign(item)) is not None), None)
    return type(value).__name__.lstrip("_")


def _line(error: BaseException, template: Template) -> int | None:
    """The line of a template in which it failed: jinja2 puts it into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == template.filename), None)


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
    """Counts loop iterations: each begins with a call."""

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
    """The facts in a template's text, before it is rendered.

    Args:
        literals: all text that it may write of its own.
        constants: the literals that are strings in expressions: it may also compare with them.
        names: the variables, functions and attributes that it reads.
        has_spans: there is a ``{% generation %}`` block.
        is_nested: there is one in a macro, or in another place whose text is made before it is written.
    """

    literals: tuple[str, ...]
    constants: tuple[str, ...]
    names: frozenset[str]
    has_spans: bool
    is_nested: bool


def parsed(sandbox: Sandbox, source: str) -> tuple[Template, Syntax]:
    """The template, ready to be rendered.

    Raises:
        TemplateError: it is not a template.
        SyntaxError: Python cannot compile what jinja2 makes of it.
        RenderError: it draws at random, or keeps a state.
    """
    tree = sandbox.parse(source)
    called = {*(node.name for node in tree.find_all(nodes.Filter)), *(node.name for node in tree.find_all(nodes.Name))}
    drawn = next((name for name in _DRAWN if name in called), None)
    if drawn is not None:
        raise RenderError(f"it uses {drawn!r}, and another build would write other text")
    found = list(_generations(tree))
    asked = (part for branch in tree.find_all(nodes.If) if _asks_for_prompt(branch.test) for part in branch.body)
    unwritten = {id(text) for part in asked for text in part.find_all((nodes.TemplateData, nodes.Const))}
    texts = [text for text in tree.find_all((nodes.TemplateData, nodes.Const)) if id(text) not in unwritten]
    constants = tuple(text.value for text in texts if isinstance(text, nodes.Const) and isinstance(text.value, str))
    syntax = Syntax(
        literals=(*(text.data for text in texts if isinstance(text, nodes.TemplateData)), *constants),
        constants=constants,
        names=frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        | {node.attr for node in tree.find_all(nodes.Getattr)},
        has_spans=bool(found),
        is_nested=any(found),
    )
    steps = sandbox.extensions[_Steps.identifier]
    assert isinstance(steps, _Steps)
    for loop in tree.find_all(nodes.For):
        steps.count_in(loop)
    with _bounded_memory(MAX_MEMORY_BYTES):  # jinja2 computes constant expressions now, but not those that fail
        code = sandbox.compile(tree)
    return Template.from_code(sandbox, code, sandbox.make_globals(None), None), syntax


def _asks_for_prompt(test: nodes.Node) -> bool:
    """Whether a condition asks for a generation prompt, which no corpus has."""
    if isinstance(test, nodes.And):
        return _asks_for_prompt(test.left) or _asks_for_prompt(test.right)
    return isinstance(test, nodes.Name) and test.name == "add_generation_prompt"


def _generations(node: nodes.Node, is_buffered: bool = False) -> Iterator[bool]:
    """For each generation block below a node, whether its text is made before it is written."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.CallBlock):
            target = child.call.node
            if isinstance(target, nodes.ExtensionAttribute) and target.identifier == _Generation.identifier:
                yield is_buffered
        is_loop = isinstance(child, nodes.For) and child.recursive
        yield from _generations(child, is_buffered or is_loop or isinstance(child, _BUFFERED))
