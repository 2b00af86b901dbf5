"""The field's kernels as a suite: public projects, as they are published, through Loom.

    python -m conformance run                    every project of the table in `projects`
    python -m conformance run fla linghe         some of them
    python -m conformance run --ci               the part that continuous integration runs
    python -m conformance run --sanitize         the tests that passed again, with every access checked
    python -m conformance run --emulate sm_90    the same on an emulated GPU, with every access checked
    python -m conformance run liger --prove      ask about each kernel what holds of it for all sizes
    python -m conformance table                  write docs/conformance.md of the results so far
    python -m conformance table --prove          write docs/proven.md, of the proofs
    python -m conformance found                  run the reproductions in docs/found.md

- `projects`: the table of projects: where each comes from, which version, which tests drive its kernels.
- `sources`: brings a project onto the machine, by pip or from GitHub.
- `run`: runs a project's tests in child processes, each test with a time limit.
- `plugin`: what a child does, as a plugin of pytest; with `observe` it tells which kernels a test launched, and with
  `redirect` the project finds a device where it asks for a GPU.
- `judge`: what the tests say about each kernel.
- `report`: the table in the documentation.
- `emulated`: the same for emulated GPUs, and what is known of what was found on them.
- `proven`: what is proven of each kernel for all sizes, and what is known of the counterexamples.
- `found`: the reproductions in the documentation.
- `cases`: drivers for the projects that have no tests of their own that fit.

Run from the directory that this package is in.
"""
