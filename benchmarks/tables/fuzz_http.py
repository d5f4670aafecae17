"""Schemathesis against the OpenAPI document of `keyhole serve`: requests that it allows or forbids."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

from benchmarks.support.rows import markdown
from benchmarks.tables.http import serve

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
SEEDS = (1, 2, 3)
EXAMPLES = 100  # for each page


def table() -> str:
    with serve() as served:
        rows = [[seed, *session(served.url, seed)] for seed in SEEDS]
    words = "with a 5xx, or a status, content type or reply that the document does not have"
    return markdown(["seed", "requests", words], rows)


def session(url: str, seed: int) -> list[object]:
    address = f"{url.partition('/v2')[0]}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", address, "--checks", ",".join(CHECKS), "--no-color"]
    options = ["--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing", "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    found = re.search(r"([\d,]+) generated, ([\d,]+) passed", ended.stdout)
    if found is None:
        raise RuntimeError(ended.stdout + ended.stderr)
    generated, passed = (int(number.replace(",", "")) for number in found.groups())
    return [generated, 0 if ended.returncode == 0 and generated == passed else f"{generated - passed} or more"]
