"""What the tests of the repository share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def files(root: Path) -> list[Path]:
    """Every file that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [root / name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


@pytest.fixture(scope="session")
def fresh_python() -> Callable[[str], Any]:
    """Run code in a new interpreter; what it assigns to `result` comes back as JSON."""

    def run(code: str) -> Any:
        script = f"import json, sys\n{code}\nprint(json.dumps(result))"
        # Switches of ours would change what the code does; the rest stays as it is.
        env = {name: value for name, value in os.environ.items() if not name.startswith("QUACK_")}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False
        )
        if done.returncode:
            pytest.fail(f"exit status {done.returncode}\n{done.stderr}", pytrace=False)
        return json.loads(done.stdout.splitlines()[-1])

    return run
