"""Raw text in, shards out. Start at pipeline.py; tasks.py decides, executors.py runs, the rest does one step each."""
