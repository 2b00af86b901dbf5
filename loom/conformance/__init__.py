"""The field's kernels as a test suite: unmodified public projects, run through Loom.

    python -m conformance run                    every project of the table in `projects`
    python -m conformance run fla linghe         some of them
    python -m conformance run --ci               the suites that continuous integration runs
    python -m conformance run --sanitize         the tests that passed again, with every access checked
    python -m conformance run --emulate sm_90    the tests on an emulated GPU, with every access checked
    python -m conformance run liger --prove      prove each kernel for all sizes
    python -m conformance table                  write docs/conformance.md from the results so far
    python -m conformance table --prove          write docs/proven.md from the proofs
    python -m conformance found                  run the reproductions in docs/found.md

- `projects`: the table of projects: source, version, and the tests that drive their kernels.
- `sources`: installs a project, by pip or from GitHub.
- `run`: runs a project's tests in child processes, each test with a time limit.
- `plugin`: the child's side, a pytest plugin; `observe` records which kernels a test launched, and `redirect` gives the
  project a device when it asks for a GPU.
- `judge`: the tests' verdict on each kernel.
- `report`: the table in the documentation.
- `emulated`: the table for emulated GPUs, and the explanations of their findings.
- `proven`: the proofs of each kernel for all sizes, and the explanations of counterexamples.
- `found`: the reproductions in the documentation.
- `cases`: drivers for projects without suitable tests of their own.

Run from the directory that contains this package.
"""
