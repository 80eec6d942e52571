"""The command line: ``kvstore serve | stats | verify | clear | doctor | demo``.

Exit codes, the same for every command: 0 it worked; 1 it failed; 2 wrong usage or configuration; 3
no daemon answers. Every refusal is one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from kvstore import __version__
from kvstore.cli_status import FAILURE, INTERRUPTED, USAGE
from kvstore.config import SCHEMA, Settings, load, suggestion
from kvstore.core.errors import ConfigError, KVStoreError

EPILOG = """exit codes: 0 ok, 1 failure, 2 wrong usage or configuration, 3 no daemon answers,
130 interrupted

Settings come from defaults, then the file (--config, KVSTORE_CONFIG, or
~/.config/kvstore/kvstore.toml), then the environment (KVSTORE_HOST_SIZE=64MiB), then flags.
`kvstore serve --print-config` shows each and its source."""

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; exit 2."""
        self.exit(USAGE, f"{self.prog}: {message}; `{self.prog} --help` lists what is valid\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, commands = build_parser(demo="demo" in arguments[:1])
    except ModuleNotFoundError as error:
        return _missing_extra(error)
    namespace, unknown = parser.parse_known_args(arguments)
    if namespace.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if unknown:
        _refuse_unknown(commands[namespace.command], unknown[0])
    command: Command = namespace.run
    _escape_output()
    try:
        code = command(namespace)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(namespace, str(error), USAGE)
    except KVStoreError as error:
        return _fail(namespace, str(error), FAILURE)
    except BrokenPipeError:
        _drop_output()
        return FAILURE
    except OSError as error:
        _drop_output()
        named = f": {error.filename}" if error.filename else ""
        return _fail(namespace, f"{error.strerror or error}{named}", FAILURE)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser(demo: bool = False) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and each command's own; the demo's own arguments only where they are needed."""
    parser = Parser(
        prog="kvstore",
        description="A KV cache service for LLM inference engines: a daemon and its tools.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    places = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name, (help_text, arguments, run) in _COMMANDS.items():
        command = places.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name != "demo" or demo:
            arguments(command)
        command.set_defaults(run=run)
        commands[name] = command
    return parser, commands


def settings_of(namespace: argparse.Namespace) -> Settings:
    """Settings of a command: file, environment and the flags that were given."""
    flags = {
        name.removeprefix("setting:"): str(value)
        for name, value in vars(namespace).items()
        if name.startswith("setting:") and value is not None
    }
    return load(flags)


def _add_settings(parser: Parser, *keys: str) -> None:
    """Flags for these settings (none named: all of them), and ``--config``."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", dest="setting:config", metavar="FILE", help="a TOML file")
    for setting in SCHEMA:
        if keys and setting.key not in keys:
            continue
        text = f"{setting.help} ({setting.kind.valid}; default {setting.default})"
        group.add_argument(
            setting.flag(),
            dest=f"setting:{setting.key}",
            metavar="VALUE",
            help=text.replace("%", "%%"),
        )


def _serve_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--print-config", action="store_true", help="print each setting and its source, and stop"
    )
    parser.add_argument("--json", action="store_true", help="with --print-config: as JSON")
    _add_settings(parser)


def _stats_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=2.0,
        type=float,
        metavar="SECONDS",
        help="again every so many seconds (2), until interrupted",
    )
    _add_settings(parser, "socket", "admin.address")


def _clear_arguments(parser: Parser) -> None:
    parser.add_argument("--model", help="a model's name or alias, as `kvstore stats` shows it")
    parser.add_argument("--tenant", help="only this tenant's chunks")
    parser.add_argument("--all", action="store_true", help="the chunks of every model")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    parser.add_argument("--json", action="store_true", help="one JSON document; implies --yes")
    _add_settings(parser, "socket", "admin.address")


def _verify_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--repair", action="store_true", help="erase every slot that a daemon would drop"
    )
    _add_settings(parser, "nvme.path")


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="check these Redis or Valkey servers instead of this machine: each writes, reads and "
        "deletes one value; 1: one can't be used, or refuses a chunk",
    )
    _add_settings(parser)


def _demo_arguments(parser: Parser) -> None:
    demo = importlib.import_module("kvstore.demo")
    demo.add_arguments(parser)


def _serve(namespace: argparse.Namespace) -> int:
    from kvstore import cli_serve

    return cli_serve.run(settings_of(namespace), namespace)


def _stats(namespace: argparse.Namespace) -> int:
    from kvstore import cli_admin

    return cli_admin.stats(settings_of(namespace), namespace)


def _clear(namespace: argparse.Namespace) -> int:
    from kvstore import cli_admin

    return cli_admin.clear(settings_of(namespace), namespace)


def _verify(namespace: argparse.Namespace) -> int:
    from kvstore import cli_verify

    return cli_verify.run(settings_of(namespace), namespace)


def _doctor(namespace: argparse.Namespace) -> int:
    from kvstore import doctor

    if namespace.redis is not None:
        setattr(namespace, "setting:redis.url", namespace.redis)
    return doctor.run(settings_of(namespace), namespace)


def _demo(namespace: argparse.Namespace) -> int:
    demo = importlib.import_module("kvstore.demo")
    try:
        return int(demo.run(namespace))
    except ModuleNotFoundError as error:
        return _missing_extra(error)


def _escape_output() -> None:
    """What the output's encoding doesn't have is escaped: names and paths may be anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What stdout didn't take goes nowhere: the interpreter would try once more at its end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _missing_extra(error: ModuleNotFoundError) -> int:
    print(
        f"kvstore demo: needs {error.name}, which isn't installed; "
        "in the checkout: pip install '.[transformers]'",
        file=sys.stderr,
    )
    return FAILURE


_COMMANDS: dict[str, tuple[str, Callable[[Parser], None], Command]] = {
    "serve": ("run the daemon in the foreground", _serve_arguments, _serve),
    "stats": ("show what a running daemon holds and does", _stats_arguments, _stats),
    "verify": (
        "check every slot of an NVMe folder that no daemon uses",
        _verify_arguments,
        _verify,
    ),
    "clear": (
        "forget the chunks of a model, on this node and in Redis",
        _clear_arguments,
        _clear,
    ),
    "doctor": ("check this machine and say what to do about it", _doctor_arguments, _doctor),
    "demo": ("show the same prompt with and without the cache", _demo_arguments, _demo),
}


def _refuse_unknown(command: Parser, argument: str) -> NoReturn:
    word = argument.partition("=")[0]
    options = [name for name in command._option_string_actions if name.startswith("--")]
    hint = suggestion(word, options) if word.startswith("--") else ""
    near = hint if hint.startswith("did you mean") else f"`{command.prog} --help` lists all"
    shown = f"{word}=..." if word != argument else word  # what follows may be a password
    command.exit(USAGE, f"{command.prog}: unknown argument {shown!r}; {near}\n")


def _fail(namespace: argparse.Namespace, message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"kvstore {namespace.command}: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
