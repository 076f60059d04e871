"""Raw text in, shards out. Start with README.md and build.py."""
