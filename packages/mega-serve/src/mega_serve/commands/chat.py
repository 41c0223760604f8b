"""The command `mega-serve chat`: a conversation in the terminal, or one message a line from a pipe."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_schema.errors import ConfigError, MegaError, escape_controls
from mega_serve.commands.connection_options import connection_options, open_client
from mega_serve.commands.option_groups import GroupedCommand, option_group
from mega_serve.commands.sampling_options import request_fields, sampling_options

if TYPE_CHECKING:
    from mega_serve.client.chat_session import ChatSession
    from mega_serve.client.http import ServerClient

_chat = option_group("Conversation")
_sampling = option_group("Sampling")
_HELP = """\
/help          print this
/reset         forget the conversation
/system TEXT   replace the system message and forget the conversation; without TEXT, print it
/save FILE     write the conversation to FILE as JSON
/quit          leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ continues on the next one."""


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("address", metavar="HOST:PORT")
@_chat("--model", help="Name of the model.  [default: the server's first]")
@_chat("--system", default="", metavar="TEXT", help="System message, at the front of the conversation.")
@_chat("--max-tokens", type=click.IntRange(min=1), help="Number of tokens of an answer, at most.")
@_chat("--markdown", is_flag=True, help="Show each answer as Markdown once it is complete (terminal only).")
@sampling_options
@_sampling("--seed", type=click.IntRange(min=0), help="Seed of the random numbers.")
@connection_options
def chat(
    address: str,
    model: str | None,
    system: str,
    max_tokens: int | None,
    markdown: bool,
    api_key_file: Path | None,
    headers: tuple[str, ...],
    timeout: float,
    insecure: bool,
    **sampling: Any,
) -> None:
    """Chat with the model of the server at HOST:PORT. /help lists the commands of the conversation.

    From a pipe, every line is a message, and the answers alone are printed.
    """
    from mega_serve.client.chat_session import ChatSession
    from mega_serve.client.generation import find_model

    client = open_client(
        address,
        "HOST:PORT",
        api_key_file=api_key_file,
        headers=headers,
        timeout=timeout,
        insecure=insecure,
        keeps_connections=False,
    )
    fields = request_fields("openai", sampling)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    # one event loop for all answers: Ctrl-C cancels the answer that runs in it, and no other code
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            fields["model"] = model or runner.run(find_model(client))["id"]
            session = ChatSession(system, fields)
            if sys.stdin.isatty() and sys.stdout.isatty():
                _Terminal(runner, client, session, markdown).run()
            else:
                _answer_lines(runner, client, session)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _answer_lines(runner: asyncio.Runner, client: ServerClient, session: ChatSession) -> None:
    """Answer every line of standard input; an error ends the command.

    Raises:
        ConfigError: there is none.
    """
    is_empty = True
    for line in sys.stdin:
        if not line.strip():
            continue
        is_empty = False
        command, _, value = line.strip().partition(" ")
        if command == "/quit":
            return
        if not _run_command(session, command, value.strip()):
            runner.run(_print_answer(client, session, line.rstrip("\n"), lambda text: text))
    if is_empty:
        hint = f"echo Hello | mega-serve chat {client.address}"
        raise ConfigError("standard input", "has no message", wanted="one message a line", hint=hint)


async def _print_answer(client: ServerClient, session: ChatSession, text: str, show: Any) -> int:
    """Print the answer as it arrives; return the number of its tokens, 0 if the server does not count."""
    from mega_serve.client.generation import TokenUsage

    usage = TokenUsage()
    piece = ""
    async with aclosing(session.ask(client, text, usage)) as pieces:
        async for piece in pieces:
            click.echo(show(piece), nl=False)
    if not piece.endswith("\n"):
        click.echo()
    return usage.completion_tokens or 0


def _run_command(session: ChatSession, command: str, value: str) -> bool:
    """Run /reset, /system or /save; return whether it was one.

    Raises:
        ConfigError: a value is missing, or there is no such command.
    """
    match command:
        case "/reset":
            session.reset()
        case "/system" if value:
            session.system = value
            session.reset()
        case "/system":
            click.echo(escape_controls(session.system) or "(no system message)", err=True)
        case "/save":
            if not value:
                raise ConfigError("/save", "needs a file", hint="/save chat.json")
            session.save(Path(value).expanduser())
        case _:
            if command.startswith("/") and command[1:].isalpha():
                raise ConfigError(command, "no such command", hint="/help lists them")
            return False
    return True


class _Terminal:
    """A conversation with line editing, colors and a stop key."""

    def __init__(
        self, runner: asyncio.Runner, client: ServerClient, session: ChatSession, markdown: bool
    ) -> None:
        from rich.console import Console

        self._runner = runner
        self._client = client
        self._session = session
        self._markdown = markdown
        self._console = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, style="dim")

    def run(self) -> None:
        """Read messages and print answers until /quit or Ctrl-D."""
        import readline  # noqa: F401  gives input() an editable line and a history

        model = escape_controls(str(self._session.fields["model"]))
        self._notes.print(f"{model} at {self._client.address}  (/help, Ctrl-D leaves)", markup=False)
        while True:
            try:
                text = self._read_message()
            except KeyboardInterrupt:
                self._notes.print("\nCtrl-D or /quit leaves")
                continue
            except EOFError:
                self._console.print()
                return
            command, _, value = text.strip().partition(" ")
            if command == "/quit":
                return
            try:
                if command == "/help":
                    self._notes.print(_HELP, markup=False)
                elif text.strip() and not _run_command(self._session, command, value.strip()):
                    self._answer(text)
            except (MegaError, OSError) as error:
                self._console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)

    def _read_message(self) -> str:
        # \001 and \002 tell readline that the colors between them take no columns
        lines = [input("\001\033[1;36m\002you>\001\033[0m\002 ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("...> "))
        return "\n".join(lines)

    def _answer(self, text: str) -> None:
        from mega_serve.client.terminal_text import for_terminal

        start = self._client.now()
        self._console.print("[bold green]model>[/] ", end="")
        try:
            if self._markdown:
                tokens = self._answer_in_markdown(text)
            else:
                tokens = self._runner.run(_print_answer(self._client, self._session, text, for_terminal))
        except KeyboardInterrupt:
            self._notes.print("\nstopped")
            return
        seconds = self._client.now() - start
        if tokens:
            self._notes.print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")

    def _answer_in_markdown(self, text: str) -> int:
        from rich.markdown import Markdown

        from mega_serve.client.generation import TokenUsage
        from mega_serve.client.terminal_text import for_terminal

        usage = TokenUsage()

        async def collect() -> str:
            async with aclosing(self._session.ask(self._client, text, usage)) as pieces:
                return "".join([piece async for piece in pieces])

        with self._console.status(""):
            answer = self._runner.run(collect())
        self._console.print()
        self._console.print(Markdown(for_terminal(answer), hyperlinks=False))
        return usage.completion_tokens or 0
