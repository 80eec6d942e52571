"""PipEnvironment: a virtual environment of its own for software that can't share ours.

vLLM and other caches (``bench/peer_*.py``) pin their own PyTorch and a hundred packages; pip fills
an environment for each of them, once.
"""

from __future__ import annotations

import subprocess
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 4
_LIST_REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires({!r}) or ()))"

Report = Callable[[str], None]


class EnvironmentFault(Exception):
    """The environment can't be built; one line says why."""


@dataclass(frozen=True, slots=True)
class PipEnvironment:
    """The environment in ``folder``.

    ``wanted`` says in one line what it holds. It is written to the file ``stamp`` when everything
    is there, so what an interrupted build left is gone on with, and another ``wanted`` is built.
    Steps are reported in a line each.
    """

    folder: Path
    stamp: str
    wanted: str
    report: Report

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def is_whole(self) -> bool:
        """Whether a build of ``wanted`` was finished."""
        stamp = self.folder / self.stamp
        return stamp.is_file() and stamp.read_text() == self.wanted

    def create(self) -> None:
        """Make the bare environment where it isn't there yet."""
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)

    def finish(self) -> None:
        """Say that it is whole."""
        (self.folder / self.stamp).write_text(self.wanted)

    def requirements(self, package: str, left_out: Sequence[str]) -> list[str]:
        """What an installed package needs, without its extras and the names left out."""
        found = subprocess.run(
            [str(self.python), "-c", _LIST_REQUIREMENTS.format(package)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        wanted = []
        for line in found.stdout.splitlines():
            name = line
            for mark in " <>=!~;[":
                name = name.split(mark)[0]
            if name and name.lower() not in left_out and "extra ==" not in line:
                wanted.append(line)
        return wanted

    def install(self, *arguments: str) -> None:
        """``pip install``; a registry may be slow or drop a connection, so it is tried again.

        Raises EnvironmentFault where it fails for good.
        """
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        command += ["install", *arguments, "--retries", "10", "--timeout", "180"]
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            self.report(f"pip install {' '.join(arguments)[:80]}")
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode == 0:
                return
            lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            reason = lines[0] if lines else f"status {ended.returncode}"
            if attempt < ATTEMPTS:
                self.report(f"trying again: {reason}")
                time.sleep(5.0 * attempt)
        raise EnvironmentFault(f"pip install failed: {reason}")
