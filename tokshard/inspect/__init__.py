"""Looking at corpora: what they hold, what their documents say, and whether every byte is as it was written."""
