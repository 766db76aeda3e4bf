"""The `convoy` command: hands each subcommand to its package, which is imported only then.

Every option has a twin in the environment, `CONVOY_` and the option's name, or `CONVOY_EXPORT_MAX_BATCH` where
another command has an option of that name that means something else. Priority: command line, environment, default.
Exit codes: 0 done, 1 the job failed, 2 wrong call; `serve` has more (`convoy.app.main`).
"""

from __future__ import annotations

import gc
import inspect as python_inspect
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.models.errors import ConvoyError, UsageError

Store = Annotated[Path, typer.Option(help="Folder of models.")]
PlanCache = Annotated[Path | None, typer.Option(help="Folder of plans; by default the server's.")]
DEFAULT_STORE = Path("store")
# What means something else to each command that has it, and so has the command's name in its twin's.
OWN_MEANINGS = frozenset({"batch_size", "json", "max_batch", "out", "seed"})

cli = typer.Typer(
    name="convoy",
    help="Takes a trained CNN, optimises it, proves it is still right, and serves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@cli.command()
def train(
    dataset: Annotated[str, typer.Argument(help="digits, cifar10, or a folder of images by class.")],
    out: Annotated[Path, typer.Option(help="Checkpoint to write, .safetensors.")],
    arch: Annotated[str, typer.Option(help="Network of the zoo.")] = "simple_cnn",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    amp: Annotated[bool | None, typer.Option(help="Mixed precision; by default where there is a GPU.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; by default the optimiser's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 64,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")] = 0,
    compare: Annotated[str | None, typer.Option(help="Devices to train on and compare, such as cpu,cuda.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where downloaded data sets lie.")] = None,
) -> None:
    """Train a CNN of the zoo and write a checkpoint."""
    from convoy.models import train_command
    from convoy.models.datasets import DEFAULT_DATA_ROOT
    from convoy.models.train import TrainOptions

    options = TrainOptions(
        dataset=dataset,
        out=out,
        arch=arch,
        device=device,  # type: ignore[arg-type]  # checked by TrainOptions itself
        amp=amp,
        optimizer=optimizer,  # type: ignore[arg-type]
        learning_rate=lr,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        data_root=data_root or DEFAULT_DATA_ROOT,
    )
    train_command.run(options, tuple(compare.split(",")) if compare else None, _console())


@cli.command()
def export(
    source: Annotated[
        str, typer.Argument(help="zoo:NAME, torchvision:NAME, timm:NAME, file.py:factory, FILE.onnx or FILE.pt2.")
    ],
    name: Annotated[str, typer.Option(help="Name to serve the model under.")],
    weights: Annotated[Path | None, typer.Option(help="Checkpoint, .safetensors or .pth; default: download.")] = None,
    input: Annotated[str | None, typer.Option(help="Input as CxHxW, such as 3x224x224.")] = None,
    labels: Annotated[Path | None, typer.Option(help="File with one label a line.")] = None,
    preprocess: Annotated[str | None, typer.Option(help="imagenet, unit, or a JSON file.")] = None,
    front: Annotated[str, typer.Option(help="uint8: normalisation in the graph; none: FP32 input.")] = "uint8",
    calibrate: Annotated[str | None, typer.Option(help="Data set whose calibration part sets the ranges.")] = None,
    evaluate: Annotated[str | None, typer.Option(help="Data set whose test part measures accuracy.")] = None,
    precisions: Annotated[str | None, typer.Option(help="Variants to make, of fp32,bf16,fp16,int8,fp8.")] = None,
    calibration_method: Annotated[str, typer.Option(help="auto, minmax, entropy or percentile.")] = "auto",
    allow_random_calibration: Annotated[bool, typer.Option(help="Without images, take ranges from noise.")] = False,
    accuracy_budget: Annotated[float, typer.Option(help="Points of top-1 a variant may lose.")] = 1.0,
    strict_gate: Annotated[bool, typer.Option(help="Refuse what is not proved to stay within the budget.")] = False,
    max_batch: Annotated[int, typer.Option(help="Largest batch.")] = 64,
    priority_levels: Annotated[int, typer.Option(help="How many priorities requests may have, 1 the most urgent.")] = 3,
    default_priority_level: Annotated[int, typer.Option(help="The one of those that name none.")] = 2,
    trust: Annotated[bool, typer.Option("--trust", help="Read a .pt2, which can run any code.")] = False,
    activation: Annotated[
        str, typer.Option(help="What makes scores of outputs: auto (found out), softmax, sigmoid or none.")
    ] = "auto",
    expect_accuracy: Annotated[float | None, typer.Option(help="Top-1 in percent that the model is known for.")] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Top-1 in percent below which nothing is published.")
    ] = None,
    weights_key: Annotated[str | None, typer.Option(help="Which entry of a .pth has the weights.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Export a network that was never trained, to try its graph.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Publish what fails the proof, marked as such.")] = False,
    store: Store = DEFAULT_STORE,
    data_root: Annotated[Path | None, typer.Option(help="Where downloaded data sets lie.")] = None,
    plan_cache: PlanCache = None,
) -> None:
    """Turn a trained CNN into a verified bundle."""
    from convoy.export.command import run
    from convoy.export.options import ExportOptions
    from convoy.models.datasets import DEFAULT_DATA_ROOT

    options = ExportOptions(
        source=source,
        name=name,
        store=store,
        weights=weights,
        input=input,
        labels=labels,
        preprocess=preprocess,
        front=front,
        calibrate=calibrate,
        evaluate=evaluate,
        precisions=precisions,
        accuracy_budget_points=accuracy_budget,
        strict_gate=strict_gate,
        calibration_method=calibration_method,
        allow_random_calibration=allow_random_calibration,
        max_batch=max_batch,
        priority_levels=priority_levels,
        default_priority_level=default_priority_level,
        trust=trust,
        activation=activation,
        expect_accuracy_percent=expect_accuracy,
        min_accuracy_percent=min_accuracy,
        weights_key=weights_key,
        random_weights=random_weights,
        force=force,
        data_root=data_root or DEFAULT_DATA_ROOT,
        plan_cache=plan_cache,
    )
    run(options, _console(), _typed("export"))


@cli.command()
def build(
    name: Annotated[str, typer.Argument(help="The model; its newest version is built.")],
    store: Annotated[Path | None, typer.Option(help="Folder of models. Without it the demo's plans are built.")] = None,
    plan_cache: PlanCache = None,
    targets: Annotated[
        str | None, typer.Option("--for", help="GPUs such as a10,l4 or sm80,sm89; by default every one since sm80.")
    ] = None,
    precisions: Annotated[str | None, typer.Option(help="Variants to build, such as fp16,int8.")] = None,
) -> None:
    """Build TensorRT plans ahead, with or without a GPU; exit 1 where one is refused."""
    from convoy.export.build_command import BuildAheadOptions, run

    raise typer.Exit(run(BuildAheadOptions(name, store, plan_cache, targets, precisions), _console()))


@cli.command()
def inspect(
    name: Annotated[str | None, typer.Argument(help="Only this model.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of models. Without it the demo is shown.")] = None,
) -> None:
    """Show variants, accuracy, latency and hashes; exit 1 if anything is broken."""
    from convoy.app.commands.inspect import run

    raise typer.Exit(run(store, name, _console()))


@cli.command()
def predict(
    name: Annotated[str, typer.Argument(help="The model.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    top_k: Annotated[int, typer.Option(help="Classes to show per image.")] = 5,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
) -> None:
    """Ask a running server to classify images."""
    from convoy.app.commands.predict import predict as ask

    raise typer.Exit(ask(url, name, images, top_k, _read_key(api_key_file)))


@cli.command()
def loadtest(
    url: Annotated[str, typer.Option(help="The server; grpc:// for gRPC.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The model; may be left out where there is one.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second.")] = None,
    steps: Annotated[str | None, typer.Option(help="Open loop: a ladder of rates, such as 100,200,400.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: clients. 16 if nothing is given.")] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search the highest rate with 99 % good within --slo-ms.")
    ] = False,
    slo_ms: Annotated[float | None, typer.Option(help="Latency within which an answer is good.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds, of each step or probe.")] = 10.0,
    warm_up: Annotated[float | None, typer.Option(help="Seconds cut off the front; by default a tenth.")] = None,
    protocol: Annotated[str, typer.Option(help="auto (from the URL), http or grpc.")] = "auto",
    body: Annotated[str, typer.Option(help="auto, image, binary or json.")] = "auto",
    arrivals: Annotated[str, typer.Option(help="Open loop: poisson, constant or bursts.")] = "poisson",
    burst_on: Annotated[float, typer.Option(help="Bursts: seconds of load.")] = 1.0,
    burst_off: Annotated[float, typer.Option(help="Bursts: seconds of silence.")] = 1.0,
    connections: Annotated[int, typer.Option(help="Open loop: most connections.")] = 512,
    processes: Annotated[str, typer.Option(help="Generator processes: auto or a number.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is lost.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and random tensors.")] = 0,
    report: Annotated[Path | None, typer.Option(help="File for a page with plots, .html.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for everything that was measured.")] = None,
    csv: Annotated[Path | None, typer.Option(help="File for a line of figures per run, step or probe.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
) -> None:
    """Load a server and say honestly how it did."""
    from convoy.loadtest.command import run
    from convoy.loadtest.options import LoadTestOptions, count_of, rates_of

    options = LoadTestOptions(
        url=url,
        model=model,
        rate=rate,
        steps=rates_of(steps),
        concurrency=concurrency,
        find_capacity=find_capacity,
        slo_ms=slo_ms,
        duration_s=duration,
        warm_up_s=warm_up,
        protocol=protocol,  # type: ignore[arg-type]  # checked by LoadTestOptions itself
        body=body,  # type: ignore[arg-type]
        arrivals=arrivals,  # type: ignore[arg-type]
        burst_on_s=burst_on,
        burst_off_s=burst_off,
        connections=connections,
        processes=count_of(processes),
        timeout_s=timeout,
        seed=seed,
        report_file=report,
        json_file=json,
        csv_file=csv,
        api_key=_read_key(api_key_file),
    )
    raise typer.Exit(run(options, _console()))


@cli.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plan_cache: PlanCache = None,
) -> None:
    """Show devices, libraries, plans, and which engines can run here and why the others cannot."""
    from convoy.app.commands.doctor import run
    from convoy.app.settings import read_settings

    settings = read_settings({} if plan_cache is None else {"plan_cache": plan_cache})
    run(json, settings.plan_folder(), _console())


@cli.command()
def batch(
    name: Annotated[str, typer.Argument(help="The model.")],
    inputs: Annotated[list[str], typer.Argument(help="Images, folders, patterns, lists (.txt), parquet files, tars.")],
    out: Annotated[Path, typer.Option(help="Folder for part-*.parquet and errors.parquet.")],
    store: Annotated[Path | None, typer.Option(help="Folder of models. Without it the demo answers.")] = None,
    model_version: Annotated[int | None, typer.Option(help="Version of the model; by default the newest.")] = None,
    top_k: Annotated[int, typer.Option(help="Classes per image.")] = 5,
    embeddings: Annotated[str | None, typer.Option(help="An output to keep whole, as a column of lists.")] = None,
    column: Annotated[str | None, typer.Option(help="Parquet: the column of paths or images, if unclear.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images a batch; 0: the model's own.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes, or Ray's actors; 0: as the machine has devices.")] = 0,
    engine: Annotated[str, typer.Option(help="Which engine may label, such as rtx or cpu.")] = "auto",
    precision: Annotated[str, typer.Option(help="Which variant of the bundle labels.")] = "auto",
    max_pixels: Annotated[int, typer.Option(help="Images with more pixels are not decoded.")] = 64_000_000,
    ray: Annotated[
        str | None, typer.Option(help="Label on a Ray cluster: its address, auto (the one that is found), or local.")
    ] = None,
) -> None:
    """Label millions of images into parquet files; the same command goes on where it stopped."""
    try:
        from convoy.app.batch_job.command import run
        from convoy.app.batch_job.job import BatchOptions
    except ModuleNotFoundError as error:
        raise UsageError(f"convoy batch needs {error.name}; pip install 'convoy-serve[batch]'") from error

    options = BatchOptions(
        name=name,
        inputs=tuple(inputs),
        out=out,
        store=store,
        model_version=model_version,
        top_k=top_k,
        embeddings=embeddings,
        column=column,
        batch_size=batch_size,
        workers=workers,
        engine=engine,
        precision=precision,
        max_pixels=max_pixels,
        ray=ray,
    )
    raise typer.Exit(run(options, _console()))


def _serve(**given: object) -> None:
    from convoy.app.main import serve
    from convoy.app.settings import read_settings

    raise typer.Exit(serve(read_settings({name: value for name, value in given.items() if value is not None})))


def _add_serve() -> None:
    """`serve` takes its options from the settings themselves, so that they are written down once."""
    from convoy.app.settings import Settings

    parameters = []
    for name, field in Settings.model_fields.items():
        shown = "the demo" if name == "store" else field.default
        help_text = f"{field.description} (default: {shown})" if shown is not None else field.description
        kind = {int: int, float: float, bool: bool}.get(field.annotation, str)  # type: ignore[arg-type]
        option = typer.Option(f"--{name.replace('_', '-')}", help=help_text, show_default=False)
        parameters.append(
            python_inspect.Parameter(
                name,
                python_inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    function: Any = _serve
    function.__signature__ = python_inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    cli.command(name="serve", help="Serve the models of a store over HTTP and gRPC.")(function)


def _command(arguments: list[str]) -> Any:
    if not arguments or arguments[0] in ("serve", "--help"):
        gc.disable()  # nothing that a start makes is garbage; the server enables it again
        _add_serve()  # the settings import the server; nobody else should wait for that
    command: Any = typer.main.get_command(cli)
    for name, subcommand in command.commands.items():
        for parameter in subcommand.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                option = parameter.opts[0].lstrip("-").replace("-", "_")
                own = f"{name}_" if option in OWN_MEANINGS and name != "serve" else ""
                parameter.envvar = f"CONVOY_{own}{option}".upper()
    return command


def _typed(subcommand: str) -> str:
    """The command line as it can be typed again, whichever door led here."""
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


def main(arguments: list[str] | None = None, default: str | None = None) -> None:
    """Run the command. `default` is the subcommand meant when none is named, for `python -m export ...`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    known = {command.name or command.callback.__name__ for command in cli.registered_commands if command.callback}
    if default is not None and (not arguments or arguments[0] not in known | {"serve"}):
        arguments = [default, *arguments]
    try:
        _command(arguments)(args=arguments, prog_name="convoy")
    except ConvoyError as error:
        print(f"convoy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
