"""Inspect corpora and plans: contents, documents, differences, training order, speed, damage."""
