"""Stand-ins for what torch lacks. Nothing here knows tokshard, and each module goes when torch has the same.

`varlen_on_cpu`: torch has no CPU kernel for its attention over documents, so code for GPUs could not be tested.
`chunked_loss`: the linear cross-entropy of torch 2.13 computes the logits twice where each token's loss is wanted.
"""
