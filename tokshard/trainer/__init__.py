"""A small reference trainer: from shards to a falling loss, on any number of ranks. README.md has the mental model."""
