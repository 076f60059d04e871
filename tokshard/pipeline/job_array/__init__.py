"""A build by several machines that share a store: jobs run its tasks, and one process commits."""
