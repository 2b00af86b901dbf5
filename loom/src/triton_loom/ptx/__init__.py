"""PTX: a parser of its text, the table of its opcodes, and flat programs for the emulator."""
