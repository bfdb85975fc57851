"""What the single file holds beside packages: its first lines, its start, a stand-in for certifi."""
