"""PTX: its text read to statements, the table of its opcodes, and flat programs that the emulator executes."""
