"""The command line: help, refusals in one line, exit codes, and nothing imported that isn't
needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import build_parser, main
from kvstore.cli_admin import AdminClient, NoDaemonError
from kvstore.core.errors import KVStoreError
from tests.conftest import private_environment, run_kvstore

COMMANDS = ("serve", "stats", "verify", "clear", "doctor", "demo")


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text.strip()


def test_help_lists_the_commands_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """A person who knows nothing finds everything."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)
    assert (
        "exit codes: 0 ok, 1 failure, 2 wrong usage or configuration, 3 no daemon answers" in text
    )


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_each_command_has_help_with_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a setting's help holds a percent sign."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "exit codes:" in capsys.readouterr().out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """``kvstore --version``."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kvstore 0.")


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage, exit code 2."""
    assert main([]) == 2
    assert "usage: kvstore" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sreve"], "invalid choice: 'sreve'"),
        (["serve", "--host-sze", "1GiB"], "did you mean --host-size?"),
        (["serve", "--host-siz=1GiB"], "did you mean --host-size?"),
        (["serve", "extra"], "unknown argument 'extra'; `kvstore serve --help` lists all"),
        (["serve", "--host-size"], "expected one argument"),
        (["stats", "--watch", "often"], "invalid float value: 'often'"),
        (["stats", "--nvme-size", "1"], "unknown argument '--nvme-size'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No page of usage: what is wrong, and where help is. An abbreviated flag is no flag."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--host-size", "lots"],
            "host.size='lots' (flag --host-size) is refused; valid:",
        ),
        (["serve", "--host-size", "900TiB"], "doesn't fit"),
        (["serve", "--nvme-size", "900TiB"], "doesn't fit"),
        (["serve", "--admin-address", "0.0.0.0:80"], "needs TLS and a token"),
        (["serve", "--socket", "/" + "x" * 200], "choose a shorter one"),
        (["serve", "--config", "/nowhere.toml"], "no file; name one that exists"),
        (["serve", "--nvme-path", f"/tmp/{'x' * 300}/nvme"], "set nvme.path to a folder of your"),
        (["serve", "--nvme-direct-io", "maybe"], "valid: auto or on or off"),
        (["stats", "--watch", "0"], "valid: 0.1 to 3600 seconds"),
        (["clear"], "name what to clear"),
        (["clear", "--all", "--model", "m"], "exclude one another"),
        (["verify", "--nvme-path", "/nowhere"], "nvme.path=/nowhere is no folder"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, private_folder: Path
) -> None:
    """field case 64 for direct I/O: each of these stops before anything is made or opened."""
    environment = private_environment(private_folder)
    done = run_kvstore(environment, *arguments)
    assert done.returncode == 2, done.stderr
    line = one_line(done.stderr)
    assert line.startswith(f"kvstore {arguments[0]}: ")
    assert message in line
    assert done.stdout == ""
    assert sorted(p.name for p in private_folder.iterdir()) == ["run"]


def test_what_the_system_refuses_is_one_line(private_folder: Path) -> None:
    """A path that no file system takes: the reason and the path, and no trace."""
    path = f"/{'x' * 300}"
    done = run_kvstore(private_environment(private_folder), "verify", "--nvme-path", path)
    assert done.returncode == 1
    assert one_line(done.stderr) == f"kvstore verify: File name too long: {path}"


def test_config_file_of_an_unknown_user_is_one_line(private_folder: Path) -> None:
    """``~name`` where there is no such user."""
    done = run_kvstore(private_environment(private_folder), "stats", "--config", "~nosuchuser/k")
    assert done.returncode == 2
    assert "config='~nosuchuser/k' (flag --config) is no file" in one_line(done.stderr)


@pytest.mark.parametrize("command", ["doctor", "serve --print-config"])
def test_output_that_nobody_takes_is_one_line(command: str, private_folder: Path) -> None:
    """A full device behind stdout; a closed one is nobody's business."""
    environment = private_environment(private_folder)
    environment.pop("PYTHONUNBUFFERED", None)
    kvstore = f"exec {sys.executable} -m kvstore.cli {command}"
    done = subprocess.run(
        ["bash", "-c", f"{kvstore} > /dev/full"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert one_line(done.stderr) == f"kvstore {command.split()[0]}: No space left on device"
    done = subprocess.run(
        ["bash", "-c", f"{kvstore} >&-"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["bash", "-c", f"{kvstore.removeprefix('exec ')} | true; exit ${{PIPESTATUS[0]}}"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) in ((1, ""), (0, ""))


def test_what_the_terminal_cannot_show_is_escaped(private_folder: Path) -> None:
    """A path in Japanese and a terminal of 1970."""
    environment = private_environment(private_folder) | {"PYTHONIOENCODING": "ascii"}
    done = run_kvstore(environment, "doctor", "--nvme-path", "/日本", "--nvme-size", "off")
    assert (done.returncode, done.stderr) == (0, "")
    assert "/\\u65e5\\u672c on " in done.stdout
    done = run_kvstore(environment, "verify", "--nvme-path", "/日本")
    assert done.returncode == 2
    assert "/\\u65e5\\u672c is no folder" in one_line(done.stderr)


def test_misspelt_variable_stops_every_command(private_folder: Path) -> None:
    """A setting that isn't used is worse than an error."""
    environment = private_environment(private_folder, {"KVSTORE_SOKCET": "/tmp/x"})
    done = run_kvstore(environment, "stats")
    assert done.returncode == 2
    assert "did you mean KVSTORE_SOCKET?" in one_line(done.stderr)


@pytest.mark.parametrize("command", [["stats"], ["stats", "--json"], ["clear", "--all", "--yes"]])
def test_without_a_daemon_it_says_so_and_exits_3(command: list[str], private_folder: Path) -> None:
    """One line, with where it looked and what to do."""
    done = run_kvstore(private_environment(private_folder), *command)
    assert done.returncode == 3
    line = one_line(done.stderr)
    assert "no daemon answers at unix:" in line
    assert "kvstore serve" in line
    assert done.stdout == ""


def test_a_socket_that_cannot_be_looked_at_is_said() -> None:
    """Another user's folder, or a name that no file has: not that nobody answers."""
    with pytest.raises(KVStoreError, match="File name too long; run it as") as caught:
        AdminClient(f"unix:/tmp/{'x' * 300}").__enter__()
    assert not isinstance(caught.value, NoDaemonError)


def test_a_dead_daemons_socket_is_no_daemon(private_folder: Path) -> None:
    """kill -9 leaves socket files behind."""
    import socket

    path = private_folder / "run" / "kvstore" / "kvstore-admin.sock"
    environment = private_environment(private_folder)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    assert run_kvstore(environment, "stats").returncode == 3


def test_print_config_shows_values_and_sources(private_folder: Path) -> None:
    """field case 106: what counts and where it is from, as text and as JSON, and nothing starts."""
    environment = private_environment(private_folder, {"KVSTORE_HOST_SIZE": "128MiB"})
    done = run_kvstore(environment, "serve", "--print-config", "--lease-s", "5", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["host.size"] == {"value": "128MiB", "source": "environment KVSTORE_HOST_SIZE"}
    assert shown["lease_s"] == {"value": "5.0s", "source": "flag --lease-s"}
    assert shown["nvme.size"]["source"] == "default (auto)"
    assert sorted(p.name for p in private_folder.iterdir()) == ["run"]


def test_every_setting_is_a_flag_of_serve() -> None:
    """field case 107: no setting is left out of the command line."""
    from kvstore.config import SCHEMA

    _, commands = build_parser()
    options = commands["serve"]._option_string_actions
    assert all(setting.flag() in options for setting in SCHEMA)


def test_demo_without_its_extra_says_what_to_install(private_folder: Path) -> None:
    """On a bare installation ``kvstore demo`` is one line, not a trace."""
    blocked = private_folder / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    environment = private_environment(private_folder)
    environment["PYTHONPATH"] = f"{blocked}:{environment['PYTHONPATH']}"
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, p=None: None if n in ('torch', 'transformers')"
        " else find(n, p)\n"
        "from kvstore.cli import main\n"
        "sys.exit(main(['demo']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install '.[transformers]'" in one_line(done.stderr)


@pytest.mark.parametrize("arguments", [["--version"], ["stats"], ["verify", "--help"]])
def test_commands_import_no_torch_and_no_more_than_they_need(
    arguments: list[str], private_folder: Path
) -> None:
    """A command line that takes a second to answer isn't used. gRPC is for those that talk."""
    code = (
        "import sys\nfrom kvstore.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'grpc', 'numpy'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=private_environment(private_folder), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    modules = done.stdout.strip().splitlines()[-1]
    assert "torch" not in modules
    assert ("grpc" in modules) == (arguments[0] == "stats")
