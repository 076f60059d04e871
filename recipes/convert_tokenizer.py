"""A `tokenizer.json` from a SentencePiece BPE model or from tiktoken ranks, if it encodes hard texts as they do.

    pip install transformers sentencepiece tiktoken protobuf
    python recipes/convert_tokenizer.py tokenizer.model DIR
    python recipes/convert_tokenizer.py o200k.tiktoken DIR PATTERN     # by which words are split: `pat_str`

No conversion is right for every model: nothing is written if one of some thousand texts has other ids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

Converted = tuple[PreTrainedTokenizerFast, Callable[[str], list[int]]]
"""The new tokenizer, and how its own library encodes."""

HARD = (
    *("", " ", "  two  spaces ", "\ttabs\nlines\n\n\r\nreturns\r", "It's 12,345.67 o'clock; WE'LL SEE", "a" * 1_000),
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # nothing\n\n\nclass A:\n\tpass\n",
    "Größe, naïve; Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 中文字符, 日本語テキスト, 한국어, \u2581 a\u2581b",
    "e\u0301 \u00e9 \ufb01 \u212b \u00a0 \u200b \u3000 \ufeff \x00 \u0085 \u2028 \U0001f469\u200d\U0001f467 \U0010ffff",
    "ab" * 500 + " " * 500 + "!" * 333 + "\n" * 100,
)


def from_pieces(file: Path) -> Converted:
    """A SentencePiece model."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(file.read_bytes())
    ids = {piece.piece: place for place, piece in enumerate(model.pieces)}
    whole = {piece.piece for piece in model.pieces if piece.type in (1, 4)}  # control pieces never come of a merge
    ranked = sorted(whole, key=lambda piece: (-model.pieces[ids[piece]].score, ids[piece]))
    pairs = (((p[:at], p[at:]) for at in range(1, len(p)) if {p[:at], p[at:]} <= whole) for p in ranked)
    merges = [pair for each in pairs for pair in sorted(each, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    spec, has_prefix = model.trainer_spec, model.normalizer_spec.add_dummy_prefix
    kept = {"unk_token": spec.unk_piece, "fuse_unk": True, "byte_fallback": spec.byte_fallback}
    found = Tokenizer(models.BPE(ids, merges, **kept))
    steps = [normalizers.Prepend("\u2581")] * has_prefix + [normalizers.Replace(" ", "\u2581")]
    found.normalizer = normalizers.Sequence(steps)
    found.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens([AddedToken(p.piece, normalized=False) for p in model.pieces if p.type == 3])
    names = {"eos_token": spec.eos_piece, "bos_token": spec.bos_piece, "unk_token": spec.unk_piece}
    original = SentencePieceProcessor(model_file=str(file))
    return PreTrainedTokenizerFast(tokenizer_object=found, **names), original.encode


def from_ranks(file: Path, pattern: str) -> Converted:
    """Ranks of tiktoken. Special tokens are not in the file: add them with `add_special_tokens` of the result."""
    from tiktoken import Encoding
    from tiktoken.load import load_tiktoken_bpe

    found = TikTokenConverter(vocab_file=str(file), pattern=pattern).converted()
    original = Encoding(file.stem, pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(file)), special_tokens={})
    return PreTrainedTokenizerFast(tokenizer_object=found), original.encode_ordinary


def texts() -> Iterator[str]:
    """Hard texts, and the characters of most scripts, in runs and between letters."""
    yield from HARD
    for start in range(0, 0x3000, 16):
        yield "".join(map(chr, range(start, start + 16)))
        yield " ".join(f"a{chr(place)}b" for place in range(start, start + 16))


if __name__ == "__main__":
    source, out, *pattern = sys.argv[1:]
    found, original = from_ranks(Path(source), *pattern) if pattern else from_pieces(Path(source))
    for text in texts():
        if (ours := found.encode(text, add_special_tokens=False)) != (theirs := list(original(text))):
            sys.exit(
                f"not written: {text[:40]!r} has the ids {theirs[:9]} by its own library, {ours[:9]} by the new one"
            )
    found.save_pretrained(out)
    print(f"written: tokshard build ... --tokenizer {out}")
