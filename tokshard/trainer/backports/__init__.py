"""Replacements for features that torch lacks. Nothing here knows tokshard. A module goes when torch has its feature.

`varlen_on_cpu`: torch has no CPU kernel for its attention over documents, so code for GPUs could not be tested.
`chunked_loss`: the linear cross-entropy of torch 2.13 computes the logits twice if it returns each token's loss.
"""
