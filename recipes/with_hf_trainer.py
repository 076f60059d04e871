"""Train under the Trainer of transformers. The same command continues where the last stopped, on any number of ranks.

torchrun --nproc-per-node 2 recipes/with_hf_trainer.py CORPUS OUT STEPS
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from tokshard.runtime import StreamingLoader, StreamPlan


class Batches(StreamingLoader):
    """Only the keys that the model takes: Trainer gives it all there are."""

    def __iter__(self):
        for batch in super().__iter__():
            print(f"rank {args.process_index} samples {batch['sample_index'].tolist()}", flush=True)
            if "loss_weights" in batch and not torch.equal(batch["loss_weights"], (batch["labels"] != -100).float()):
                raise ValueError(
                    "the model's own loss knows no weights of targets: build the corpus without --loss weighted, "
                    "or train with Accelerate"
                )
            inputs = {key: batch[key] for key in ("input_ids", "position_ids", "labels")}
            yield inputs | {"shift_labels": batch["labels"]}  # or the model would shift them a second time


class LoaderState(TrainerCallback, ExportableState):
    """The loader's state, in trainer_state.json."""

    def state(self):
        return {"args": {}, "attributes": loader.state_dict()}

    def on_train_begin(self, _, state, *__, **___):
        loader.load_state_dict(state.stateful_callbacks["LoaderState"]["attributes"])


class StreamingTrainer(Trainer):
    def get_train_dataloader(self):
        return loader  # not prepared: each rank has its own rows already


corpus, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
args = TrainingArguments(out, max_steps=steps, save_steps=3, ignore_data_skip=True, report_to="none", seed=17)
loader = Batches(StreamPlan(corpus, seq_len=32, seed=17), global_batch_size=12)  # after args set up torch.distributed
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=2**14, use_cache=False, **sizes))
trainer = StreamingTrainer(model, args, callbacks=[LoaderState()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
loader.close()
