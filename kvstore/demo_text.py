"""The text that the demo's prompts share: documents of this project, wherever it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

DOCUMENTS = ("LICENSE", "ARCHITECTURE.md")
QUESTIONS = (
    "What does the license say about patents?",
    "Under which conditions may I redistribute the work?",
    "What does the license say about trademarks?",
    "Is there any warranty for the work?",
)


def shared_text() -> str:
    """LICENSE and ARCHITECTURE.md of a source tree; of an installed package, its license and, so
    that there is always a text, the sources of its core."""
    package = Path(__file__).resolve().parent
    found = [package.parent / name for name in DOCUMENTS]
    found += _installed_documents() + sorted((package / "core").glob("*.py"))
    texts = {path.name: path for path in reversed(found) if path.is_file()}
    ordered = [texts[path.name] for path in found if texts.get(path.name) == path]
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in ordered)


def _installed_documents() -> list[Path]:
    """Documents that the installed distribution carries in its metadata."""
    try:
        listed = files("kvstore") or []
    except PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in listed if file.name in DOCUMENTS]
