"""Train a GPT under Megatron-LM. The same command continues where the last one stopped, on any number of ranks.

PYTHONPATH=MEGATRON_LM torchrun --nproc-per-node 8 recipes/with_megatron_lm.py --dataloader-type external \
    --data-path CORPUS --valid-data-path CORPUS --save OUT --load OUT ...
"""

from glob import escape, glob

import torch
from megatron.core import mpu
from torch.nn.utils.rnn import pad_sequence

from tokshard.runtime import StreamingLoader, StreamPlan


class Batches:
    """The micro-batches of a plan for this rank, in the form that `get_batch` of Megatron-LM takes."""

    def __init__(self, path, args):
        plan = StreamPlan(path, seq_len=args.seq_length, seed=args.seed)
        # ranks that differ only in tensor, pipeline or context parallelism have one data-parallel rank: the same rows
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        # a step of the loader is a micro-batch of all ranks, so `--rampup-batch-size` changes nothing here
        batch_size = args.micro_batch_size * ranks
        self.loader = StreamingLoader(plan, global_batch_size=batch_size, dp_rank=rank, dp_world_size=ranks)
        self._batches = iter(self.loader)  # reads nothing before the first batch
        self._args = args

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        weights = batch.get("loss_weights", (batch["labels"] != -100).float())  # conversations have the key
        if weights.frac().any():  # it divides by the sum of a micro-batch, rounded down
            raise SystemExit(
                "Megatron-LM takes only whole weights of targets: build the corpus with 1 and 2 for 0.5 and 1"
            )
        return {
            "tokens": batch["input_ids"],
            "labels": batch["labels"].clamp(min=0),
            "loss_mask": weights,
            "position_ids": batch["position_ids"],
            **self._documents(batch),
        }

    def _documents(self, batch):
        """What keeps the documents of a row apart in attention."""
        bounds = batch["cu_seqlens"].unique()
        rows, length = batch["input_ids"].shape
        if getattr(self._args, "dataloader_inter_document_masking", False):
            starts = torch.arange(0, rows * length, length)
            of_rows = [bounds[(bounds >= start) & (bounds <= start + length)] - start for start in starts]
            cu_seqlens = pad_sequence(of_rows, batch_first=True, padding_value=length).int()
            return {"cu_seqlens": cu_seqlens, "max_seqlen": cu_seqlens.diff().amax(1)}
        if self._args.create_attention_mask_in_dataloader:
            document = torch.bucketize(torch.arange(rows * length), bounds, right=True).view(rows, 1, length)
            is_other = document.unsqueeze(3) != document.unsqueeze(2)
            return {"attention_mask": is_other | torch.ones(length, length, dtype=torch.bool).triu(1)}
        return {}

    def save_state(self):
        """Megatron-LM saves this with the checkpoint, once for each data-parallel rank."""
        return self.loader.state_dict()

    def restore_state(self, state):
        self.loader.load_state_dict(state)


def datasets(args, vp_stage=None):
    """The iterators of training, validation and test, after Megatron-LM has loaded its checkpoint."""
    if mpu.get_tensor_model_parallel_rank() > 0:
        return None, None, None  # rank 0 of the group reads, and sends the batch to the others
    train = Batches(args.data_path[0], args)
    if vp_stage is not None:  # with interleaved stages, Megatron-LM cannot save a state
        train.loader.skip(args.consumed_train_samples)
    else:
        args.dataloader_save = args.save  # the state belongs into the checkpoint
        # the state is the same on every rank, so the file of the first serves any number of them
        folder = escape(f"{args.load}/iter_{args.iteration:07d}")
        for path in glob(f"{folder}/mp_rank_*/train_dataloader_dprank000.pt")[:1]:
            train.restore_state(torch.load(path)["dataloader_state_dict"])
    if train.loader.cursor.sample != args.consumed_train_samples:
        raise SystemExit(f"the checkpoint of step {args.iteration} in {args.load} has no state of this loader")
    if not args.valid_data_path:
        return train, None, None  # with `--eval-iters 0`
    valid = Batches(args.valid_data_path[0], args)
    valid.loader.skip(args.consumed_valid_samples)
    return train, valid, None


def main():
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from pretrain_gpt import forward_step, get_embedding_ranks

    def provider(_num_samples, vp_stage=None):
        return datasets(get_args(), vp_stage)

    provider.is_distributed = True  # it is called on every rank
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    model_type = ModelType.encoder_or_decoder
    pretrain(config, provider, model_type, forward_step, get_embedding_ranks=get_embedding_ranks)


if __name__ == "__main__":
    main()
