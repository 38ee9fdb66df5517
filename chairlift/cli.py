"""The `chairlift` command."""

import argparse
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift import __version__
from chairlift.errors import ChairliftError

# As shells have it: 128 and the number of SIGINT, or SIGTERM.
_STOPPED, _TERMINATED = 130, 143


class _Parser(argparse.ArgumentParser):
    """A parser that says of a flag that there is not what may have been meant."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        # The beginning of a flag would mean another one as soon as there is a new flag.
        super().__init__(*args, **{**settings, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but what is left over is an error here, where the flags of this very command are known."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            from chairlift.config.flags import dashed
            from chairlift.config.other_names import hint

            known = [flag.removeprefix("--").replace("-", "_") for flag in self._option_string_actions]
            flags = [each.partition("=")[0] for each in left if each.startswith("--")]
            hints = [hint(flag[2:], known, lambda name: f"--{dashed(name)}") for flag in flags]
            said = [f"there is no {flag}{said}" for flag, said in zip(flags, hints, strict=True)]
            self.error("\n".join(said) or f"unrecognized arguments: {' '.join(left)}")
        return found, left


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 130 after Ctrl-C, 1 if it fails or nobody reads what it prints."""
    started = time.monotonic()
    _show_anything()
    try:
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv), started)
        except ChairliftError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt as stop:
            print(f"chairlift: {str(stop) or 'stopped'}", file=sys.stderr)
            status = _STOPPED
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is left to be printed would fail once more when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 1


def _show_anything() -> None:
    """Have what the terminal's encoding lacks printed as an escape: models write any character, and paths have any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str], started: float) -> int:
    if arguments[:1] in (["serve"], ["run"]):
        # Until their event loops handle it: the first process of a container is deaf to what it does not handle.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    args = _parser(arguments).parse_args(arguments)
    if args.command == "serve":
        return _serve(args, started)
    return int(args.run(args))


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; the one that is asked for has its flags."""
    parser: argparse.ArgumentParser = _Parser(
        prog="chairlift", description="Serve a model with the batching that suits it."
    )
    parser.add_argument("--version", action="version", version=f"chairlift {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_chat(commands, wanted=arguments[:1] == ["chat"])
    _add_run(commands, wanted=arguments[:1] == ["run"])
    _add_why(commands, wanted=arguments[:1] == ["why"])
    _add_top(commands, wanted=arguments[:1] == ["top"])
    _add_timeline(commands, wanted=arguments[:1] == ["timeline"])
    _add_record(commands, wanted=arguments[:1] == ["record"])
    _add_keys(commands, wanted=arguments[:1] == ["keys"])
    _add_bench(commands, wanted=arguments[:1] == ["bench"])
    _add_plan(commands, wanted=arguments[:1] == ["plan"])
    _add_check(commands, wanted=arguments[:1] == ["check"])
    _add_hub(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from chairlift.config.flags import add_flags

    about = "serve a model over HTTP; every flag --a-b is also CHAIRLIFT_A_B and the key a_b of chairlift.toml"
    add_flags(commands.add_parser("serve", help="serve a model over HTTP", description=about))


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("chat", help="talk to a server, or to a model's folder, in this terminal")
    if wanted:
        from chairlift.commands.terminal import add_flags, chat_command

        add_flags(parser)
        parser.set_defaults(run=chat_command)


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("run", help="send the lines of a file to a model, and write one result for each")
    if wanted:
        from chairlift.config.run import add_flags
        from chairlift.run.main import main as run

        add_flags(parser)
        parser.set_defaults(run=run)


def _add_why(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("why", help="say why a request waits, or what became of it")
    if wanted:
        from chairlift.commands.why import add_why_flags, why_command

        add_why_flags(parser)
        parser.set_defaults(run=why_command)


def _add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("top", help="show the requests that a server has, as they come and go")
    if wanted:
        from chairlift.commands.why import add_top_flags, top_command

        add_top_flags(parser)
        parser.set_defaults(run=top_command)


def _add_timeline(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    about = "write the timeline of a server's last minute, for ui.perfetto.dev (a trace for plan: record)"
    parser = commands.add_parser("timeline", help=about)
    if wanted:
        from chairlift.commands.why import add_timeline_flags, timeline_command

        add_timeline_flags(parser)
        parser.set_defaults(run=timeline_command)


def _add_record(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("record", help="write what comes to a server to a file, as a trace without text")
    if wanted:
        from chairlift.commands.why import add_record_flags, record_command

        add_record_flags(parser)
        parser.set_defaults(run=record_command)


def _add_keys(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("keys", help="make API keys, and the file of them that a server reads")
    if wanted:
        from chairlift.config.keys import add_flags, keys_command

        add_flags(parser)
        parser.set_defaults(run=keys_command)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    if not wanted:
        # Only a name for --help: the benchmark's imports would slow down the start of the server.
        commands.add_parser("bench", help="compare strategies or number formats, or send a trace to a server")
        return
    from chairlift.bench.strategies_command import add_parser

    add_parser(commands)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("plan", help="find the settings that suit a model's traffic on this machine")
    if wanted:
        from chairlift.planning.plan_command import add_plan

        add_plan(parser)


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: bool) -> None:
    parser = commands.add_parser("check", help="say whether a model can be served, and what memory it takes")
    if wanted:
        from chairlift.commands.check import add_flags, check_command

        add_flags(parser)
        parser.set_defaults(run=check_command)


def _add_hub(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from chairlift.hub.manage import add_commands

    add_commands(commands)


def _serve(args: argparse.Namespace, started: float) -> int:
    if find_spec("uvloop") is None:
        print("chairlift: the server needs uvloop, which this system does not have", file=sys.stderr)
        return 1
    from chairlift.config.settings import load
    from chairlift.demo import demo_path
    from chairlift.server.front import bind, serve

    settings = load(
        vars(args),
        os.environ,
        Path.cwd(),
        str(demo_path()),
        own_server=args.own_server,
        # A port that is taken is told before gigabytes come.
        before_fetch=lambda server: bind(server).close(),
    )
    return serve(settings, started)


if __name__ == "__main__":
    sys.exit(main())
