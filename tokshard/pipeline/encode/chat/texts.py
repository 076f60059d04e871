"""Conversations in a build: checks before the first one is read, and the documents of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UNDECODABLE, TokenizerError, UsageError
from tokshard.extras import version_of
from tokshard.format.loss import LOSS, WEIGHTS
from tokshard.format.manifest import BuildConfig, ChatConfig, TokenizerInfo
from tokshard.pipeline.encode.chat.omissions import Omission
from tokshard.pipeline.encode.chat.probe import takes_of
from tokshard.pipeline.encode.chat.records import MALFORMED_CHAT, ChatRecordError, conversation
from tokshard.pipeline.encode.chat.spans import NOTHING_TO_LEARN, ChatDocument, ChatEncoder
from tokshard.pipeline.encode.chat.template import VARIABLES, ChatTemplate, own_template, template_variables
from tokshard.pipeline.encode.chat.tokens import Speller, document_end, missing_tokens
from tokshard.pipeline.encode.encoder import EncodedTexts
from tokshard.pipeline.encode.tokenizer_file import TokenizerFile, parsing, read_config
from tokshard.pipeline.options import OWN, BuildOptions
from tokshard.pipeline.sources.chats import TemplateSource
from tokshard.pipeline.sources.records import UNREAD, Problem
from tokshard.store import locate, look_at, open_store

CUT_TOKENS = "loss begins inside a token"
CUT_SHORT = "cut to max-tokens"
STAYED = "stayed text: "
_PROBE = ("Hello.", "Hi.", "Bye.")


def read_template(location: str, tokenizer: TokenizerFile, options: BuildOptions) -> TemplateSource:
    """Read a chat template.

    Args:
        location: a file, the folder of a tokenizer, or `OWN`.

    Raises:
        UsageError: it cannot be read, or there is none.
    """
    if location == OWN:
        text = own_template(tokenizer.config, tokenizer.template, options.tokenizer)
    elif (found := look_at(location)) is None:
        raise UsageError(
            f"there is no chat template {location}",
            hint=f"give a file, the folder of a tokenizer, or --chat {OWN} for the tokenizer's own",
        )
    elif found.name.endswith("/"):
        text = own_template(*read_config(open_store(location)), location)
    else:
        folder, file = locate(location)
        try:
            text = folder.get(file).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{location} is not UTF-8: {error}", hint="give another chat template") from error
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{location} cannot be read: {reason}", hint="check its permissions") from error
    return TemplateSource(text=text, variables=template_variables(tokenizer.config), date=options.chat_date)


def checked_chat(
    tokenizer: TokenizerFile, source: TemplateSource, options: BuildOptions
) -> tuple[ChatConfig, TokenizerInfo, list[str]]:
    """The manifest's entry on conversations, the tokenizer with the token that ends them, and notes.

    Raises:
        UsageError: the template or the tokenizer cannot be used.
    """
    loss = options.loss
    template = ChatTemplate(source, needs_spans=loss != "all", max_characters=1 << 20)
    speller = Speller(parsing(tokenizer.content, tokenizer.info))
    end, end_id = document_end(
        speller,
        options.document_end,
        config=source.variables,
        literals=template.syntax.literals,
        written=template.written_variables(),
    )
    special = sorted({**tokenizer.info.special_ids, end: end_id}.items(), key=lambda item: item[1])
    info = msgspec.structs.replace(tokenizer.info, eos=end, eos_id=end_id, special_ids=dict(special))
    config = ChatConfig(
        template=source.sha256,
        jinja2=version_of("jinja2"),
        loss=loss,
        chat_date=source.date,
        overlong=options.overlong,
        template_drops=options.template_drops,
    )
    roles = zip(_PROBE, ("user", "assistant", "user"), strict=True)
    probe = {"messages": [{"role": role, "content": text} for text, role in roles]}
    notes = [f"each conversation ends in {end!r}, which is not a target"]
    unnamed = [name for name in VARIABLES if name in template.syntax.names and name not in source.variables]
    notes += [f"the chat template reads {name}, which tokenizer_config.json does not name" for name in unnamed]
    try:
        document = ChatEncoder(template, speller, loss=loss, end_id=end_id)(conversation(probe))
    except ChatRecordError as error:
        return config, info, [*notes, f"the chat template fails on a short conversation: {error.detail}"]
    written = speller.spell(document.ids).decode(errors="replace")
    notes += _check_fit(speller, template.syntax.literals, written)
    if dropping := [repr(token) for token in speller.strips if token in written]:
        notes.append(f"the tokenizer drops white space beside {', '.join(dropping)}")
    last = document.ids[: document.loss[-1]]
    text = speller.spell(last).decode(errors="replace")
    if loss != "all" and text.rstrip().endswith(_PROBE[1]):
        notes.append(
            "the template marks answers without what ends their turn, so a model does not learn from them where to stop"
        )
    return config, info, notes


def _check_fit(speller: Speller, literals: Sequence[str], written: str) -> list[str]:
    """Notes on control tokens that a template writes, and the tokenizer does not have.

    Args:
        written: a short conversation as the template writes it.

    Raises:
        TokenizerError: one of them ends an answer.
    """
    hint = "add it to the tokenizer as a special token, as the guide to conversations shows, or give another template"
    _, _, behind = written.partition(_PROBE[1])
    ending = missing_tokens(behind.partition(_PROBE[2])[0], speller)
    for token, count in ending.items():
        if behind.lstrip().startswith(token):
            raise TokenizerError(
                f"the chat template ends answers by {token!r}, which the tokenizer does not have: it would be "
                f"{count} tokens of text",
                hint=hint,
            )
    missing = missing_tokens("\n".join([written, *literals]), speller)
    return [
        f"the chat template writes {token!r}, which the tokenizer does not have: it becomes {count} tokens of text"
        for token, count in missing.items()
    ]


class ChatTexts:
    """Makes documents of conversations that are JSON.

    Args:
        content: bytes of the ``tokenizer.json``.

    Attributes:
        control: tokens that stay text where a message spells them.
    """

    def __init__(self, content: bytes, source: TemplateSource, config: BuildConfig, info: TokenizerInfo) -> None:
        assert config.chat is not None
        loss: Any = config.chat.loss
        template = ChatTemplate(source, needs_spans=loss != "all", max_characters=config.max_document_bytes)
        self._takes = takes_of(template)
        self._encode = ChatEncoder(
            template,
            Speller(content),
            loss=loss,
            end_id=info.eos_id,
            is_strict=config.chat.template_drops == "fail",
        )
        self.control = self._encode.control
        self._is_weighted = loss == "weighted"
        self._most = config.max_tokens if config.chat.overlong == "head" else None

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Make the documents of conversations."""
        ids: list[NDArray[np.uint32]] = []
        loss: list[NDArray[np.uint32]] = []
        weights: list[NDArray[np.float32]] = []
        failed: dict[int, Problem] = {}
        idle: list[int] = []
        changes: dict[str, list[int]] = {}
        omitted: list[Sequence[Omission]] = []
        for index, text in enumerate(texts):
            try:
                document = self._encode(conversation(_decoded(text), self._takes))
                if self._most is not None and len(document.ids) > self._most:
                    document = _head(document, self._most)
                    changes.setdefault(CUT_SHORT, []).append(index)
            except ChatRecordError as error:
                if error.reason == NOTHING_TO_LEARN:
                    idle.append(index)
                else:
                    failed[index] = error.reason, error.detail
                continue
            except RecursionError:
                failed[index] = MALFORMED_CHAT, "its values are nested too deeply"
                continue
            for what in (*(UNREAD + name for name in document.unread), *(STAYED + token for token in document.stayed)):
                changes.setdefault(what, []).append(index)
            omitted.append(document.omitted)
            ids.append(document.ids)
            loss.append(document.loss)
            weights.append(document.weights)
            if document.num_cut:
                changes.setdefault(CUT_TOKENS, []).append(index)
        return EncodedTexts(
            np.concatenate(ids) if ids else np.empty(0, np.uint32),
            np.cumsum([len(found) for found in ids], dtype=np.int64),
            (),
            failed,
            idle,
            {LOSS: loss, WEIGHTS: weights} if self._is_weighted else {LOSS: loss},
            changes,
            omitted,
        )


def _decoded(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ChatRecordError(MALFORMED_CHAT, f"it is not JSON: {error}") from error
    return found


def _head(document: ChatDocument, most: int) -> ChatDocument:
    """The first tokens of a document, and its end."""
    borders = np.minimum(document.loss, most - 1).reshape(-1, 2)
    is_kept = borders[:, 0] < borders[:, 1]
    if not is_kept.any():
        raise ChatRecordError(NOTHING_TO_LEARN, "no token of its head is a target")
    return replace(
        document,
        ids=np.append(document.ids[: most - 1], document.ids[-1:]),
        loss=borders[is_kept].reshape(-1),
        weights=document.weights[is_kept],
    )
