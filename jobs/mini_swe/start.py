"""Lays the task's files out as a git repository in the working directory, then becomes `mini`.

The files come from `~/files.json`, as `{"files": {path: text}}`; a text that begins with `#!` is
made executable. The arguments are mini's own.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Prepare the repository and run mini-swe-agent as its console script would."""
    lay_out(json.loads((Path.home() / "files.json").read_text())["files"])
    sys.argv[0] = "mini"
    runpy.run_module("minisweagent", run_name="__main__", alter_sys=True)


def lay_out(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    for command in ("init --quiet", "add --all", "commit --quiet --allow-empty --message=start"):
        subprocess.run(["git", *command.split()], check=True)


if __name__ == "__main__":
    main()
