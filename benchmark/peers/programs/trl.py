"""TRL: the preparation of its SFTTrainer, with the loss on answers alone, and its packing."""

from typing import Any

from benchmark.peers.programs import common
from benchmark.peers.programs.rows import Stage, figures, save


def chat(settings: common.Settings) -> dict[str, Any]:
    """Everything that SFTTrainer does before its first step, but for making the model."""
    import datasets
    import transformers
    import trl
    from trl.trainer import sft_trainer

    prepare, pack = Stage(), Stage()
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["tokenizer"])
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **shape))
    with prepare:
        dataset = datasets.load_dataset(
            "json", data_files=settings["chats_with_text_of_tools"], split="train", cache_dir=settings["folder"]
        )
    packs, prepares = sft_trainer.pack_dataset, trl.SFTTrainer._prepare_dataset

    def timed_packing(*given: Any, **named: Any) -> Any:
        with pack:
            return packs(*given, **named)

    def timed(*given: Any, **named: Any) -> Any:
        with prepare:
            return prepares(*given, **named)

    sft_trainer.pack_dataset, trl.SFTTrainer._prepare_dataset = timed_packing, timed
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=settings["folder"],
            assistant_only_loss=True,
            packing=True,
            packing_strategy=settings["strategy"],
            max_length=settings["seq_len"],
            dataset_num_proc=settings["workers"],
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    prepare.seconds -= pack.seconds
    prepare.cpu_seconds -= pack.cpu_seconds
    pieces: list[tuple[list[int], list[bool]]] = []
    rows = list(trainer.train_dataset)
    for row in rows:
        batch = trainer.data_collator([row])  # its labels are what the model is given
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        start = 0
        for length in row["seq_lengths"]:
            # the model shifts: a token is predicted by the one before it, and the first of a piece by none
            marks = [False, *(label != -100 for label in labels[start + 1 : start + length])]
            pieces.append((ids[start : start + length], marks))
            start += length
    save(settings["out"], pieces)
    return figures(prepare, pack) | {"rows": len(rows), "used": sum(len(ids) for ids, _ in pieces)}


def tokshard_chat(settings: common.Settings) -> dict[str, Any]:
    """Tokshard in this environment: with the engine that its peers have."""
    from benchmark.peers.programs import tokshard_chat

    return tokshard_chat.chat(settings) | {"versions": common.versions(("tokenizers",))}


if __name__ == "__main__":
    common.main({"chat": chat, "tokshard_chat": tokshard_chat}, ("trl", "transformers", "tokenizers"))
