"""`dstack-shim-fleet`: the record, for an operator's eyes and hands, on the server's host."""
