"""The commands that judge: verify, prove, audit, tune and report. `weft.cli` loads each when it is chosen."""
