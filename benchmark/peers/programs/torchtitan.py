"""torchtitan: its chat dataset, which renders, encodes, masks and packs while it is read."""

import json
import re
from pathlib import Path
from typing import Any

from benchmark.peers.programs import common
from benchmark.peers.programs.rows import Stage, figures, save


def chat(settings: common.Settings) -> dict[str, Any]:
    """One pass over what it takes: one question and one answer, without tools."""
    import datasets
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import ChatDataset

    records = [json.loads(line) for line in Path(settings["chats"]).read_text(encoding="utf-8").splitlines()]
    taken = [record for record in records if _is_taken(ChatDataset, record)]
    tokenizer = HuggingFaceTokenizer(tokenizer_path=_folder_without_markers(settings))
    place = Path(settings["folder"]) / "taken.jsonl"
    place.write_text("".join(json.dumps({"messages": one["messages"]}) + "\n" for one in taken), encoding="utf-8")

    prepare, both = Stage(), Stage()

    class Timed(ChatDataset):
        def _tokenize_sample(self, sample: dict[str, Any]) -> Any:
            with prepare:
                return super()._tokenize_sample(sample)

    with both:
        with prepare:
            dataset = datasets.load_dataset("json", data_files=str(place), split="train", cache_dir=settings["folder"])
        rows = list(
            Timed(
                dataset=dataset,
                tokenizer=tokenizer,
                sample_processor=lambda sample: sample["messages"],
                seq_len=settings["seq_len"],
            )
        )
    both.seconds -= prepare.seconds
    both.cpu_seconds -= prepare.cpu_seconds
    pieces = [piece for row in rows for piece in _pieces(row)]
    save(settings["out"], pieces)
    return figures(prepare, both) | {"rows": len(rows), "used": sum(len(ids) - 1 for ids, _ in pieces)}


def _is_taken(kind: Any, record: dict[str, Any]) -> bool:
    try:
        kind._validate_messages(record["messages"])
    except ValueError:
        return False
    return not record.get("tools")


def _folder_without_markers(settings: common.Settings) -> str:
    """Its environment of jinja2 does not know ``{% generation %}``, and its masks do not need it."""
    folder = Path(settings["folder"]) / "tokenizer"
    folder.mkdir()
    source = Path(settings["tokenizer"])
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    begun = re.sub(r"\{%-? generation -?%\}", "{%- if true %}", config["chat_template"])
    config["chat_template"] = re.sub(r"\{%-? endgeneration -?%\}", "{%- endif %}", begun)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def _pieces(row: Any) -> list[tuple[list[int], list[bool]]]:
    """Conversations of a row, each with its last token, which is a label alone; padding is not one."""
    (inputs, positions), labels = (row[0]["input"].tolist(), row[0]["positions"].tolist()), row[1].tolist()
    starts = [index for index, position in enumerate(positions) if position == 0]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
        marks = [label != -100 for label in labels[start:stop]]
        if any(marks):
            found.append(([*inputs[start:stop], labels[stop - 1]], [False, *marks]))
    return found


if __name__ == "__main__":
    common.main({"chat": chat}, ("torchtitan", "tokenizers"))
