"""What a chip can do, as a file: load it, check it, list it."""
