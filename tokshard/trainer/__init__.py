"""A small reference trainer: shards to a falling loss on any number of ranks. README.md has the mental model."""
