"""SentencePiece BPE models as ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokshard.errors import TokenizerError
from tokshard.interop.conversion import (
    SPACE,
    Conversion,
    added_token,
    merge_pairs,
    missing_package,
    refuse,
    tokenizer_json,
)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_BPE = 2


def convert_pieces(path: Path, content: bytes) -> Conversion:
    """Convert a SentencePiece BPE model; arguments and errors as for `convert`.

    Args:
        content: the bytes of the file.
    """
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        missing_package(path, "a SentencePiece model", error)
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
        if not model.pieces:
            raise ValueError("it has no pieces")
        processor = SentencePieceProcessor(model_proto=content)
    except Exception as error:  # the library raises errors of protobuf and RuntimeError
        raise TokenizerError(
            f"{path} is neither a SentencePiece model nor a tiktoken rank file: {error}",
            hint="give a SentencePiece .model or tiktoken ranks",
        ) from error
    _check_expressible(path, model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    added = [
        added_token(index, piece, special=kind == _CONTROL)
        for index, (piece, _, kind) in enumerate(pieces)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    # where no piece crosses the start of a word, words can be encoded one by one
    crosses = any(SPACE in piece[1:] for piece, _, kind in pieces if kind in (_NORMAL, _USER_DEFINED))
    parsed = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model.normalizer_spec))},
        "pre_tokenizer": None
        if crosses
        else {"type": "Split", "pattern": {"String": SPACE}, "behavior": "MergedWithNext", "invert": False},
        "post_processor": None,
        "decoder": _decoder(is_prefixed=model.normalizer_spec.add_dummy_prefix),
        "model": _bpe_of_pieces(
            pieces, unknown=model.trainer_spec.unk_piece, has_bytes=model.trainer_spec.byte_fallback
        ),
    }
    control = {piece for piece, _, kind in pieces if kind == _CONTROL}
    names = {"eos_token": model.trainer_spec.eos_piece, "bos_token": model.trainer_spec.bos_piece}
    return Conversion(
        content=tokenizer_json(parsed),
        config={key: piece for key, piece in names.items() if piece in control},
        original=processor.encode,
        note=f"converted from the SentencePiece model {path.name}, SHA-256 {hashlib.sha256(content).hexdigest()}",
    )


def _check_expressible(path: Path, model: Any) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    problem = None
    if trainer.model_type != _BPE:
        # SentencePiece adds scores in single precision and tokenizers in double, so near ties fall differently
        problem = "it is not a BPE model, and others are encoded differently for some texts"
    elif normalizer.precompiled_charsmap:
        # tokenizers looks characters up by grapheme, SentencePiece by longest match
        problem = f"it normalizes characters ({normalizer.name}), which tokenizers does differently for some texts"
    elif any(piece.type == _UNUSED for piece in model.pieces):
        problem = "it has unused pieces"
    elif trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        problem = "it treats white space in an unusual way"
    if problem:
        refuse(path, problem)


def _bpe_of_pieces(pieces: Sequence[tuple[str, float, int]], *, unknown: str, has_bytes: bool) -> dict[str, Any]:
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind in (_NORMAL, _USER_DEFINED)}
    # control pieces and bytes never result from a merge, so text cannot become one
    made = sorted((piece for piece in scores if len(piece) > 1), key=lambda piece: (-scores[piece], vocabulary[piece]))
    merges = [pair for piece in made for pair in merge_pairs(piece, scores, vocabulary)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": has_bytes,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _normalizers(spec: Any) -> Iterator[dict[str, Any]]:
    if spec.remove_extra_whitespaces:
        # at the end of a text, the character for a space counts as a space, too
        yield {"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE}]+\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if spec.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _decoder(*, is_prefixed: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if is_prefixed:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
