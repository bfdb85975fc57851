"""The HTTP API: bodies in, the core's work, statuses out."""
