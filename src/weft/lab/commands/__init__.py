"""The commands that judge: verify, prove, audit, tune and report. `weft.cli` loads each one on demand."""
