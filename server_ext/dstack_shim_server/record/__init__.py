"""The record of instances and restarts in the server's own database, and the thread that keeps it."""
