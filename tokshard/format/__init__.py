"""The disk contract: schema, manifest, writer, reader, storage. See README.md in this folder for the bytes."""
