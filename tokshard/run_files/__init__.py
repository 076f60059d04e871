"""Files that describe a job, and its checkpoints: readable without torch.

`plan_file` reads a plan from TOML (a mix.toml, or the recipe or a checkpoint of the trainer), with `strict_toml`, which
refuses unknown keys and wrong types. `recipe` reads the rest of a recipe, and `model_shape` the sizes of its model.
`checkpoint_directory` knows the checkpoints of the trainer. `saved_state` finds the state of a loader in any
checkpoint. Only `torch_checkpoints` needs torch: it reads files of torch, and executes nothing in them.
"""
