"""Python processes that begin with PyTorch and Triton imported: that takes longer than what a test wants of them.

They are forks of one process that has done nothing else. Loom reads its environment variables, and looks for its
compiler, only when something is launched.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

_FORKS = """
import json, os, runpy, sys
import torch, triton

for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, file in enumerate((os.devnull, *call["output"])):
    os.dup2(os.open(file, os.O_RDWR), number)
os.chdir(call["directory"])
os.environ.clear()
os.environ.update(call["environment"])
first, *rest = call["arguments"]
if first == "-m":
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)
    runpy.run_path(first, run_name="__main__")
"""


@functools.cache
def _origin() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FORKS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_python(
    *arguments: str | Path, seconds: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python script ...` or `python -m module ...` does, says and returns."""
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in output:
            file.touch()
        call = {
            "arguments": [str(argument) for argument in arguments],
            "environment": {**os.environ, "COLUMNS": "200", **environment},
            "directory": os.getcwd(),
            "output": [str(file) for file in output],
        }
        origin = _origin()
        assert origin.stdin
        assert origin.stdout
        print(json.dumps(call), file=origin.stdin, flush=True)
        if not select.select([origin.stdout], [], [], seconds)[0]:
            origin.kill()
            _origin.cache_clear()
            raise subprocess.TimeoutExpired(
                call["arguments"], seconds, *(file.read_text() for file in output)
            )
        status = int(origin.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(file.read_text() for file in output))
