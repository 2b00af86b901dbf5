"""Read the reports that commands write as JSON."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from ...cli.screen import Refused


def read_report(path: Path, kinds: Container[str], schema: int | None = None) -> dict[str, Any]:
    """Return a report of one of these commands, or refuse the file and say what it is."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Refused(f"{path} is no report: it is not JSON") from None
    kind = report.get("report") if isinstance(report, dict) else None
    if kind not in kinds:
        what = (
            f"a report of `{kind}`, which is not read here"
            if isinstance(kind, str)
            else "no report of Weft's"
        )
        raise Refused(f"{path} is {what}")
    if schema is not None and report.get("schema") != schema:
        schema_found = report.get("schema")
        raise Refused(f"{path} has the schema {schema_found}, this Weft reads {schema}: run `{kind}` again")
    return dict(report)
