"""What the single file holds beside packages: its first lines, its start, stand-ins for modules of others."""
