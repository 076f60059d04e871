"""Files that say what a job is and where it is.

`plan_file` reads a plan from TOML (a mix.toml, or the recipe or a checkpoint of the trainer), with `strict_toml`, which
refuses unknown keys and wrong types. `saved_state` finds the state of a loader in any checkpoint; `torch_checkpoints`
reads what torch has saved, without executing anything of it.
"""
