"""Generates kvstore/proto_gen from the .proto files; needs grpcio-tools.

``python proto/generate.py`` writes the modules, ``--check`` only says which differ and exits with
1. Each file is compiled as if it lay in kvstore/proto_gen, so that the modules import one another
from there, in a checkout as in an installed wheel.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "kvstore/proto_gen"
LINK = Path("proto/kvstore/engine/v1/engine.proto")
ADMIN = Path("proto/kvstore/admin/v1/admin.proto")


def generate(source: Path, target: Path) -> None:
    """Compile one .proto file of the repository into ``target``; raises SystemExit on an error."""
    command = [
        "protoc",
        f"-I{PACKAGE}={(REPOSITORY / source).parent}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--pyi_out={target}",
    ]
    if protoc.main([*command, f"{PACKAGE}/{source.name}"]):
        raise SystemExit(f"proto: {source} doesn't compile")


def differing(made: Path) -> list[str]:
    """Names of the modules in the repository that aren't what was made just now."""
    names = []
    for new in sorted((made / PACKAGE).iterdir()):
        old = REPOSITORY / PACKAGE / new.name
        if not old.exists() or old.read_bytes() != new.read_bytes():
            names.append(f"{PACKAGE}/{new.name}")
    return names


def main() -> int:
    """Write or check the generated modules."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 on difference")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        for source in (LINK, ADMIN):
            if (REPOSITORY / source).exists():
                generate(source, made)
        names = differing(made)
        if check:
            for name in names:
                print(f"proto: {name} is out of date; run `make proto`")
            return 1 if names else 0
        for name in names:
            (REPOSITORY / name).write_bytes((made / name).read_bytes())
            print(f"proto: wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
