"""What the trainer misses in torch. Nothing here knows tokshard, and each module goes when torch has the same.

`varlen_on_cpu`: torch has no CPU kernel for its attention over documents, so code for GPUs could not be tested.
`chunked_loss`: the linear cross-entropy of torch 2.13 computes the logits twice where each token's loss is wanted.
`step_ledger`: the FSDPMemTracker of torch 2.13 wraps hooks of FSDP, and units of two modules are gathered twice.
"""
