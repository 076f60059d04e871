"""What datatrove writes is imported, and its data sets read what tokshard exports for Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.interop.real_text import ROOT, TOKENIZER, imported
from tokshard import export_corpus

pytest.importorskip("datatrove")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

FILE = str(TOKENIZER / "tokenizer.json")
EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(FILE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The paragraphs of the pages of this repository."""
    pages = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in str(path))
    found = [text for page in pages for text in page.read_text(encoding="utf-8").split("\n\n")]
    return [text for text in found if EOS not in text]  # which datatrove takes for the end of a document


@pytest.fixture(scope="module")
def documents(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each text, and EOS."""
    eos = tokenizer.token_to_id(EOS)
    return [[*encoded.ids, eos] for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]


def run(step: Any, texts: list[str], num_ranks: int) -> None:
    """Run the last step of a pipeline as so many ranks, each with its part of the texts."""
    from datatrove.data import Document

    size = -(-len(texts) // num_ranks)
    for rank in range(num_ranks):
        part = texts[rank * size : (rank + 1) * size]
        # a prompt without loss makes a mask of its tokens
        found = (Document(text=text, id=str(at), metadata={"no_loss_ranges": [(0, 1)]}) for at, text in enumerate(part))
        step.run(found, rank, num_ranks)


def written(folder: Path) -> list[list[int]]:
    """What datatrove itself reads of its files: their documents, in the order of the names."""
    from datatrove.pipeline.tokens.merger import get_data_reader, load_doc_ends

    return [
        np.frombuffer(data, "<u2").tolist()
        for file in sorted(folder.glob("*.ds"))
        for data in get_data_reader(file.open("rb"), load_doc_ends(Path(f"{file}.index").open("rb")), nb_bytes=2)
    ]


def test_files_that_are_shuffled_merged_and_masked_are_imported_in_the_order_of_their_index(texts, documents, tmp_path):
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    settings: dict[str, Any] = {"save_loss_metadata": True, "seed": 17}
    for folder, limit in (("ds", 5_000), ("whole", None)):
        step = DocumentTokenizer(
            str(tmp_path / folder),
            FILE,
            eos_token=EOS,
            max_tokens_per_file=limit,
            **settings,
        )
        run(step, texts, 2)
    DocumentTokenizerMerger(str(tmp_path / "whole"), str(tmp_path / "merged"), "all", progress=False, **settings).run()
    for folder in ("ds", "merged"):
        result, found = imported(tmp_path / folder, tmp_path / f"out-{folder}")
        assert found == written(tmp_path / folder)
        assert found != documents
        assert sorted(found) == sorted(documents)
        assert result.num_targets is not None


def test_documents_that_are_cut_at_chunks_become_one_document_for_each_piece(texts, tokenizer, tmp_path):
    from datatrove.pipeline.tokens import DocumentTokenizer

    eos = tokenizer.token_to_id(EOS)
    step = DocumentTokenizer(str(tmp_path / "ds"), FILE, eos_token=EOS, seed=17, shuffle_chunk_size=256)
    run(step, texts, 1)
    pieces = written(tmp_path / "ds")
    result, found = imported(tmp_path / "ds", tmp_path / "out")
    # an EOS at the start of a chunk is a piece of nothing else
    assert found == [piece if piece[-1] == eos else [*piece, eos] for piece in pieces if piece != [eos]]
    num_cut = sum(piece[-1] != eos for piece in pieces)
    assert num_cut > 10
    assert result.notes == (f"{num_cut:,} documents did not end in '{EOS}': it was added",)


def test_files_that_datatrove_writes_for_megatron_are_imported(texts, documents, tmp_path):
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    step = MegatronDocumentTokenizer(str(tmp_path / "megatron"), tokenizer_name_or_path=FILE, eos_token=EOS)
    run(step, texts, 2)
    assert imported(tmp_path / "megatron", tmp_path / "out")[1] == documents


def test_its_data_set_reads_the_ids_of_an_export_for_megatron(corpus, tokenizer, tmp_path):
    from datatrove.utils.dataset import DatatroveFolderDataset

    export_corpus(corpus[0], format="megatron", out=tmp_path / "out")
    eos = tokenizer.token_to_id(EOS)
    data = DatatroveFolderDataset(
        str(tmp_path / "out"),
        seq_len=127,
        filename_pattern="*.bin",
        return_positions=True,
        positions_from_eos_token_id=eos,
    )
    tokens = [token for document in corpus[1] for token in document]
    rows = [tokens[start : start + 128] for start in range(0, len(tokens) - 127, 128)]
    assert [data[index]["input_ids"].tolist() for index in range(len(data))] == rows
    starts = [[0, *(at + 1 for at, token in enumerate(row[:-1]) if token == eos)] for row in rows]
    expected = [[at - max(s for s in first if s <= at) for at in range(128)] for first in starts]
    assert [data[index]["positions"].tolist() for index in range(len(data))] == expected


def test_its_reader_of_parquet_gives_the_documents_of_an_export_as_text(corpus, tokenizer, tmp_path):
    from datatrove.pipeline.readers import ParquetReader

    def adapter(self: Any, row: dict[str, Any], path: str, index: int) -> dict[str, Any]:
        return {"text": tokenizer.decode(row["input_ids"]), "id": f"{path}/{index}", "metadata": {"page": row["page"]}}

    export_corpus(corpus[0], format="hf", out=tmp_path / "out", drop_eos=True)
    found = list(ParquetReader(str(tmp_path / "out"), adapter=adapter).run())
    assert [document.text for document in found] == [tokenizer.decode(document[:-1]) for document in corpus[1]]
    assert found[3].metadata["page"] == 3
