"""One file a change. Each only adds: an older replica may still be writing."""
