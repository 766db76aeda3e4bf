"""The `convoy` command: passes each subcommand to its package, which is imported only then.

Every option has an environment variable, `CONVOY_` and the option's name, or `CONVOY_EXPORT_MAX_BATCH` if another
command has an option of that name with another meaning. Precedence: command line, environment, the file of `serve`,
default.

Exit codes: 0 done, 1 the job failed, 2 wrong usage; `serve` has more (`convoy.app.server.main`). Errors are one line on
stderr, so that stdout only has results.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import inspect as python_inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from convoy.models.checkout import pip_install
from convoy.models.errors import ConvoyError, UsageError
from convoy.models.option import Option, is_of_kubernetes

if TYPE_CHECKING:
    from convoy.models.tls import ClientTls

KeyFile = Annotated[Path | None, typer.Option(help="File with the API key.")]
CaFile = Annotated[
    Path | None, typer.Option(help="PEM file with the CA of the server's certificate; default: the system's.")
]
CertFile = Annotated[Path | None, typer.Option(help="PEM file with your client certificate.")]
CertKeyFile = Annotated[Path | None, typer.Option(help="PEM file with its key; default: the certificate file.")]
# Options with another meaning in each command: their variables include the command's name.
OWN_MEANINGS = frozenset(
    {"batch_size", "config", "json", "max_batch", "out", "seed", "timeout", "weights", "weights_key"}
)
# The same for one command only; in the others the option means the same.
_OWN_OF_ONE = frozenset({("train", "precision")})

cli = typer.Typer(
    name="convoy",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich truncates the names of options and variables at 80 columns
)


config = typer.Typer(help="Show the settings of `convoy serve`, or the schema of its file.", no_args_is_help=True)
cli.add_typer(config, name="config")
# The headings of `--help`, those that most users need first.
HELP_GROUPS = (
    *("Arguments", "Basics", "Model", "Network", "Images", "Accuracy", "Optimisation", "Speed", "Load", "Requests"),
    *("Models", "Limits", "Security", "Logging", "Output", "Advanced", "Options"),
)
_EPILOG = (
    "Each option is also an environment variable: --some-option is CONVOY_SOME_OPTION, unless another name is shown."
)
_HELP_ALL = "--help-all"
_MOST_OPTIONS = 20  # as many as fit on one screen
_KEYWORD = python_inspect.Parameter.KEYWORD_ONLY
EXIT_INTERRUPTED = 130
_COMPLETE = "_CONVOY_COMPLETE"
# Usage errors of typer: UsageError of click, or of typer's own copy of it, by version.
_WrongCall: Any = typer.BadParameter.__mro__[1]


class _OfRecord(NamedTuple):
    """A command whose options are the fields of a record, followed by its own parameters."""

    function: Any
    module: str
    record: str
    own: tuple[python_inspect.Parameter, ...]

    def tell(self, is_meant: bool) -> None:
        """Declare the options to typer; the records of other commands need not be imported."""
        asked = _asked(getattr(importlib.import_module(self.module), self.record)) if is_meant else ()
        self.function.__signature__ = python_inspect.Signature([*asked, *self.own])


_OF_RECORDS: list[_OfRecord] = []


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write the options of a command under headings, in the order of `HELP_GROUPS`.

    A command with many options shows only the basic ones, unless `--help-all` asks for the rest.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        is_argument = parameter.param_type_name == "argument"
        group = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
        if (record := parameter.get_help_record(context)) is not None:
            groups.setdefault(group, []).append(record)
    count = sum(len(options) for group, options in groups.items() if group != "Arguments")
    is_whole = count <= _MOST_OPTIONS or _HELP_ALL in context.meta
    order = sorted(groups, key=HELP_GROUPS.index)
    shown = order if is_whole else [group for group in order if group in ("Arguments", "Basics")]
    for group in shown:
        with formatter.section(group):
            formatter.write_dl(groups[group])
    if not is_whole:
        left = ", ".join(group for group in order if group not in (*shown, "Options"))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"`{context.command_path} {_HELP_ALL}` shows all {count} options: {left}, and others.")


def _help_arguments(context: Any, arguments: list[str]) -> list[str]:
    """Read `--help-all` as a longer `--help`; a subcommand handles its own."""
    if _HELP_ALL not in arguments or set(arguments) & {*getattr(context.command, "commands", ())}:
        return arguments
    context.meta[_HELP_ALL] = True
    return ["--help"]


class _GroupedCommand(typer.core.TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, _help_arguments(ctx, args))
        return parsed

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class _CommandWithOthers(typer.core.TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, _help_arguments(ctx, args))
        return parsed

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


# A command of its own, and one with subcommands.
load_tests = typer.Typer(cls=_CommandWithOthers)
cli.add_typer(load_tests, name="loadtest")


def _of_record(module: str, record: str, tell: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`tell` declares the function to typer; by default it is a command."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters = python_inspect.signature(function, eval_str=True).parameters.values()
        own = tuple(one for one in parameters if one.kind is not python_inspect.Parameter.VAR_KEYWORD)
        _OF_RECORDS.append(_OfRecord(function, module, record, own))
        registered: Callable[..., None] = (tell or cli.command(cls=_GroupedCommand, epilog=_EPILOG))(function)
        return registered

    return register


def _asked(record: type) -> Iterator[python_inspect.Parameter]:
    """The parameters for the fields of a record, each under the field's name."""
    hints = get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        for said in getattr(hints[field.name], "__metadata__", ()):
            yield _parameter(field, get_args(hints[field.name])[0], said)


def _parameter(field: dataclasses.Field[Any], kind: Any, said: Option) -> python_inspect.Parameter:
    words = get_args(kind) if get_origin(kind) is Literal else said.words
    is_text = said.read is not None or bool(words)
    name = (said.name,) if said.name else ()
    asking = typer.Argument if said.is_argument else typer.Option
    default = python_inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return python_inspect.Parameter(
        field.name,
        _KEYWORD,
        default=default if said.read is None else said.typed_default,
        annotation=Annotated[
            str | None if is_text else kind,
            asking(*name, help=said.help, callback=said.read, rich_help_panel=said.group or None, **_one_of(words)),
        ],
    )


def _one_of(words: Sequence[str]) -> dict[str, Any]:
    """What typer shows and completes for an option with the values `words`; its reader refuses others."""
    if not words:
        return {}
    return {
        "metavar": f"[{'|'.join(words)}]",
        "autocompletion": lambda incomplete: [word for word in words if word.startswith(incomplete)],
    }


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from convoy.app.version import in_words

        print(in_words())
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of Convoy and its runtimes.",
        ),
    ] = False,
) -> None:
    """Takes a trained CNN, optimises it, proves it is still right, and serves it."""


@_of_record("convoy.models.train_options", "TrainOptions")
def train(
    *,
    compare: Annotated[
        str | None, typer.Option(help="Variants to train and compare, such as cpu,cuda:fp16:compiled.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where downloaded data sets lie.")] = None,
    **asked: Any,
) -> None:
    """Train a CNN of the zoo and write a checkpoint.

    Example: convoy train digits --arch simple_cnn --out digits.safetensors
    """
    from convoy.models import train_command
    from convoy.models.train_options import TrainOptions

    options = TrainOptions(**asked, data_root=data_root)
    train_command.run(options, tuple(compare.split(",")) if compare else None, _console())


@_of_record("convoy.export.options", "ExportOptions")
def export(
    *,
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with these options; it has the lowest precedence."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every finding, and what the libraries log.")
    ] = False,
    **asked: Any,
) -> None:
    """Turn a trained CNN into a verified bundle.

    Example: convoy export torchvision:resnet18 --weights default --data photos
    """
    from convoy.export.command import run
    from convoy.export.config_file import read_options
    from convoy.export.options import ExportOptions

    if config is not None:
        asked |= {name: value for name, value in read_options(config).items() if _source(context, name) == "DEFAULT"}
    _log_libraries(is_verbose=verbose)
    run(ExportOptions(**asked), _console(), _typed("export"), is_verbose=verbose)


def _log_libraries(*, is_verbose: bool) -> None:
    """Keep the chatter of libraries off the console unless the user wants to see it."""
    logging.captureWarnings(capture=True)
    logging.basicConfig(level=logging.INFO if is_verbose else logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger("convoy").setLevel(logging.DEBUG if is_verbose else logging.WARNING)


@_of_record("convoy.export.options", "BuildAheadOptions")
def build(**asked: Any) -> None:
    """Build TensorRT plans ahead of time; exit 1 if one is refused."""
    from convoy.export.ahead import run
    from convoy.export.options import BuildAheadOptions

    raise typer.Exit(run(BuildAheadOptions(**asked), _console()))


@cli.command(cls=_GroupedCommand, epilog=_EPILOG)
def inspect(
    name: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Folder of models, or its URL (s3://). Without it the demo is shown.")
    ] = None,
    hashes: Annotated[bool, typer.Option("--hashes", help="Print the SHA-256 of each file.")] = False,
) -> None:
    """Show and verify bundles; exit 1 if anything is broken."""
    from convoy.app.commands.inspect import run

    raise typer.Exit(run(store, name, _console(), has_hashes=hashes))


@cli.command(cls=_GroupedCommand, epilog=_EPILOG)
def predict(
    name: Annotated[str, typer.Argument(help="The model.")],
    images: Annotated[list[str], typer.Argument(help="Image files, folders, patterns, or - for one from stdin.")],
    url: Annotated[str, typer.Option(help="The server; grpc://HOST:8001 asks over gRPC.")] = "http://127.0.0.1:8000",
    top_k: Annotated[
        int | None, typer.Option(help="Classes or boxes to show per image; by default five classes, or all boxes.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Lowest score to show; by default the model's, or none for classes.")
    ] = None,
    iou: Annotated[
        float | None,
        typer.Option(help="How much boxes of a class may overlap, above 0 and at most 1; by default the model's."),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw boxes, class map or classes into a copy of the image: a new file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON per image, as they come.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each image, tries included.")] = 60.0,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: CertFile = None,
    client_key_file: CertKeyFile = None,
) -> None:
    """Send images to a running server and print its predictions."""
    from convoy.app.client.client import Client
    from convoy.app.commands.predict import predict as ask

    tls = _client_tls(ca_file, client_cert_file, client_key_file)
    with Client(url, api_key=_read_key(api_key_file), timeout_s=timeout, verify=tls or True) as client:
        asked = ask(client, name, images, top_k, threshold=threshold, iou=iou, draw=draw, as_json=json)
        raise typer.Exit(asked)


@_of_record(
    "convoy.loadtest.options", "LoadTestOptions", load_tests.callback(invoke_without_command=True, epilog=_EPILOG)
)
def loadtest(
    *,
    context: typer.Context,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: CertFile = None,
    client_key_file: CertKeyFile = None,
    **asked: Any,
) -> None:
    """Measure throughput and latency of a server.

    Example: convoy loadtest --rate 200 --report report.html
    """
    if context.invoked_subcommand is not None:
        given = [name for name in asked if _source(context, name) == "COMMANDLINE"]
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{named} before {context.invoked_subcommand} has no effect; leave it out")
        return
    from convoy.loadtest.command import run
    from convoy.loadtest.options import LoadTestOptions

    tls = _client_tls(ca_file, client_cert_file, client_key_file)
    raise typer.Exit(run(LoadTestOptions(**asked, api_key=_read_key(api_key_file), tls=tls), _console()))


@load_tests.command(cls=_GroupedCommand, epilog=_EPILOG)
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A file of --json.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The file to compare with it.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Compare different loads and invalid runs, too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare two runs and say which differences are significant."""
    from convoy.loadtest.compare import compare as show

    show(a, b, anyway=anyway, as_json=json, console=_console())


@cli.command(cls=_GroupedCommand, epilog=_EPILOG)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plan_cache: Annotated[Path | None, typer.Option(help="Folder of plans; by default the server's.")] = None,
) -> None:
    """Show devices, libraries, plans, and which engines can run here."""
    from convoy.app.commands.doctor import run
    from convoy.app.config.settings import read_settings

    settings = read_settings({} if plan_cache is None else {"plan_cache": plan_cache})
    run(json, settings.plan_folder(), _console())


@_of_record("convoy.app.batch.job", "BatchOptions")
def batch(**asked: Any) -> None:
    """Label many images into parquet files, resumable."""
    try:
        from convoy.app.batch.command import run
    except ModuleNotFoundError as error:
        raise UsageError(f"convoy batch needs {error.name}; {pip_install('batch')}") from error
    from convoy.app.batch.job import BatchOptions

    raise typer.Exit(run(BatchOptions(**asked), _console()))


@cli.command(name="serve", cls=_GroupedCommand, epilog=_EPILOG)
def _serve(context: typer.Context, **given: object) -> None:
    """Serve the models of a store over HTTP and gRPC.

    Example: convoy serve --store store --port 8000
    """
    from convoy.app.config.settings import read_settings
    from convoy.app.server.main import serve

    raise typer.Exit(serve(read_settings(_on_command_line(context, given)), _unknown_variables(os.environ)))


@config.command(name="show", cls=_GroupedCommand, epilog=_EPILOG)
def _show(context: typer.Context, json: bool, **given: object) -> None:
    """Show effective settings and where each comes from."""
    from convoy.app.commands.config import show
    from convoy.app.config.settings import read_settings

    show(read_settings(_on_command_line(context, given)), json)


@config.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors."""
    from convoy.app.commands.config import schema as text

    print(text(), end="")


def _on_command_line(context: typer.Context, given: dict[str, object]) -> dict[str, object]:
    """Without values from the environment, which the settings read and track themselves."""
    return {
        name: value for name, value in given.items() if _source(context, name) == "COMMANDLINE" and value is not None
    }


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like options but belong to no command, each with the nearest of `serve`."""
    from convoy.app.config.settings import Settings
    from convoy.app.config.sources import PREFIX

    options = {name.upper() for name in Settings.model_fields}
    asked = {
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and name.upper().removeprefix(PREFIX) not in options
        and not is_of_kubernetes(name, value)
    }
    if asked:  # other commands' options are imported only now
        asked -= {*_twins(_command([]))}
    near = {name: get_close_matches(name.upper().removeprefix(PREFIX), options, 1) for name in sorted(asked)}
    return [f"{name} (did you mean {PREFIX}{found[0]}?)" if found else name for name, found in near.items()]


def _twins(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter.envvar, str):
            yield parameter.envvar
    for subcommand in getattr(command, "commands", {}).values():
        yield from _twins(subcommand)


def _source(context: typer.Context, name: str) -> str:
    source: Any = context.get_parameter_source(name)
    return source.name if source is not None else ""


def _tell_settings(is_meant: bool) -> None:
    """`serve` and `config show` take their options from the settings, so that they are declared once.

    The settings import the server, which other commands should not wait for.
    """
    asked = [*_of_settings()] if is_meant else []
    context = python_inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    as_json = typer.Option("--json", help="For machines.")
    asks_json = python_inspect.Parameter("json", _KEYWORD, default=False, annotation=Annotated[bool, as_json])
    _tell(_serve, [context, *asked])
    _tell(_show, [context, *asked, asks_json])


def _tell(function: Any, parameters: list[python_inspect.Parameter]) -> None:
    function.__signature__ = python_inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _of_settings() -> Iterator[python_inspect.Parameter]:
    from convoy.app.config.settings import OPTION_GROUPS, Settings, has_names

    group_of = {name: group for group, names in OPTION_GROUPS.items() for name in names}
    for name, field in Settings.model_fields.items():
        if has_names(field):
            continue
        help_text = (
            f"{field.description} (default: {field.default})" if field.default not in (None, "") else field.description
        )
        kind = {int: int, float: float, bool: bool}.get(field.annotation, str)  # type: ignore[arg-type]
        words = get_args(field.annotation) if get_origin(field.annotation) is Literal else _enumerated(field)
        flag = f"--{name.replace('_', '-')}"
        option = typer.Option(
            flag, help=help_text, show_default=False, rich_help_panel=group_of.get(name), **_one_of(words)
        )
        yield python_inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[kind | None, option])


def _enumerated(field: Any) -> Sequence[str]:
    said = field.json_schema_extra
    words: Sequence[str] = said.get("enum", ()) if isinstance(said, dict) else ()
    return words


def _command(arguments: list[str]) -> Any:
    """With the options of the subcommand that is named first or, if none is, with those of all."""
    is_of_settings = arguments[:1] in ([], ["serve"], ["config"])
    _tell_settings(is_of_settings)
    for one in _OF_RECORDS:
        one.tell(is_meant=arguments[:1] in ([], [one.function.__name__]))
    command: Any = typer.main.get_command(cli)
    for name, subcommand in command.commands.items():
        _name_twins(subcommand, name)
    return command


def _name_twins(command: Any, name: str) -> None:
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            option = parameter.opts[0].lstrip("-").replace("-", "_")
            is_own = (option in OWN_MEANINGS and name != "serve") or (name, option) in _OWN_OF_ONE
            own = f"{name}_" if is_own else ""
            twin = f"CONVOY_{own}{option}".upper()
            parameter.envvar = None if is_of_kubernetes(twin, os.environ.get(twin, "")) else twin
            parameter.show_envvar = bool(own)
    for inner, subcommand in getattr(command, "commands", {}).items():
        if name != "config":  # the settings read theirs, and know the source
            _name_twins(subcommand, f"{name}_{inner}")


def _typed(subcommand: str) -> str:
    """The command line as it can be typed again, whichever entry point was used."""
    given = sys.argv[1:]
    return shlex.join(["convoy", *([] if given[:1] == [subcommand] else [subcommand]), *given])


def _console() -> Any:
    from rich.console import Console

    return Console()


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file {path} cannot be read: {error}") from error


def _client_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ClientTls | None:
    """None means the libraries' default. Raises UsageError."""
    if ca is None and cert is None and key is None:
        return None
    from convoy.models.tls import ClientTls

    ca_file, cert_file, key_file = (None if one is None else str(one) for one in (ca, cert, key))
    return ClientTls(ca_file, cert_file, key_file)


def _with_value(arguments: list[str], option: str, value: str) -> list[str]:
    """The same, with `value` after an option without one, which typer cannot express."""
    given = []
    for one, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        given.append(one)
        if one == option and following.startswith("-"):
            given.append(value)
    return given


def _to_complete() -> list[str] | None:
    """The words that a shell asks to complete; None if none asks."""
    if _COMPLETE not in os.environ:
        return None
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return typed.split()[1:] or [""]  # up to the subcommand, which has no blank


def _take_name_of_shell(arguments: list[str]) -> None:
    """`--show-completion bash`: typer detects the calling shell, and accepts a name only if detection is disabled."""
    if arguments[:1] in (["--show-completion"], ["--install-completion"]) and len(arguments) > 1:
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"


def main(arguments: list[str] | None = None, default: str | None = None) -> None:
    """Run the command. `default` is the subcommand if none is named, for `python -m export ...`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    commands = {command.name or command.callback.__name__ for command in cli.registered_commands if command.callback}
    known = commands | {group.name for group in cli.registered_groups}
    if default is not None and (not arguments or arguments[0] not in known):
        arguments = [default, *arguments]
    if arguments[:1] == ["batch"]:
        arguments = _with_value(arguments, "--ray", "auto")
    _take_name_of_shell(arguments)
    words = _to_complete()
    if words is None and arguments[:1] == ["serve"]:
        gc.disable()  # nothing that a start makes is garbage; the server enables it again
    try:
        # Without arguments, only the list of commands is needed.
        command = _command((arguments or ["--help"]) if words is None else words)
        sys.exit(command(args=arguments, prog_name="convoy", standalone_mode=False) or 0)
    except ConvoyError as error:
        print(f"convoy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except _WrongCall as error:
        print(_in_words(error), file=sys.stderr)
        sys.exit(error.exit_code)


def _in_words(error: Any) -> str:
    """One line or, without arguments, the whole help."""
    message = error.format_message()
    if message.startswith("Usage:"):
        return str(message)
    asked = error.ctx.command_path if error.ctx is not None else "convoy"
    return f"convoy: {' '.join(message.split()).rstrip('.')}; see `{asked} --help`"


if __name__ == "__main__":
    main()
