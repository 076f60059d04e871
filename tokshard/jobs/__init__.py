"""What describes a job, and what it leaves on disk: files, for programs that need not train.

`plan_file` reads a plan from TOML (a mix.toml, or the recipe or a checkpoint of the trainer), with `strict_toml`, which
refuses unknown keys and wrong types; `recipe` reads the rest of a recipe, `model_shape` has the sizes of models. A run
leaves checkpoints (`checkpoint_directory`), metrics (`metrics_file`) and a lock (`run_lock`). `saved_state` finds the
state of a loader in any checkpoint; `torch_checkpoints` reads what torch has saved, without executing anything of it.
"""
