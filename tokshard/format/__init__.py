"""The disk contract: schema, manifest, writer, corpus, shard. See README.md in this folder for the bytes."""
