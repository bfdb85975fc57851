"""A dstack shim that can be stopped, killed and replaced at any instant while jobs run."""
