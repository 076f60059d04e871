"""datatrove: its local executor with JsonlReader and DocumentTokenizer, a task for each file."""

from pathlib import Path

from benchmark.peers.programs.common import END_OF_TEXT, Settings, files, folder_bytes, main


def build(settings: Settings) -> dict[str, int]:
    """Documents are not shuffled, which would be a second pass."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    out = settings["out"]
    encode = DocumentTokenizer(
        output_folder=f"{out}/tokens",
        tokenizer_name_or_path=f"{settings['tokenizer']}/tokenizer.json",
        eos_token=END_OF_TEXT,
        shuffle_documents=False,
    )
    LocalPipelineExecutor(
        pipeline=[JsonlReader(settings["texts"], glob_pattern="*.jsonl*"), encode],
        tasks=len(files(settings["texts"])),
        workers=settings["processes"],
        logging_dir=f"{out}/logs",
    ).run()
    return {}


def count(settings: Settings) -> dict[str, int]:
    """Documents that an index names, and their tokens."""
    import numpy as np

    found = list(Path(settings["out"], "tokens").glob("*.index"))
    ends = [np.fromfile(path, np.uint64) for path in found]
    return {
        "documents": sum(map(len, ends)),
        "tokens": int(sum(each[-1] for each in ends if len(each))),
        "output_bytes": folder_bytes(f"{settings['out']}/tokens"),
    }


if __name__ == "__main__":
    main({"build": build, "count": count}, ["datatrove", "tokenizers"])
