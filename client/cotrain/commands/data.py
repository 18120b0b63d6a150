"""Commands on files of conversations.

`cotrain data show` prints their datums, with the trained parts marked. `cotrain sweep` trains one file with several
settings, and keeps the best run.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cotrain.clients.service import ServiceClient
from cotrain.clients.sweep import Sweep, Trial
from cotrain.commands.terminal import AsJson, Harmless, examples, failing_in_a_sentence, opened, print_result, table
from cotrain.data import Conversation, TooLong, TrainOn, marked, parts, read_chat, render
from cotrain.errors import TokenizerMissing, UnsupportedInput
from cotrain.learning_rates import constant, cosine, linear
from cotrain.transport.progress import PROGRESS
from cotrain.wire.datums import Datum

ModelName = Annotated[str | None, typer.Option(help="The server's model, if it has several.")]
TokenizerName = Annotated[
    str | None, typer.Option(help="A folder or a name on the hub. Default: that of the server's model.")
]
TrainOnText = Annotated[str, typer.Option(help="last_answer, all_answers or each_answer.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens of a datum.")]

SWEEP_EXAMPLES = examples(
    "cotrain sweep train.jsonl --lr 1e-5,1e-4,1e-3 --rank 8,32",
    "cotrain sweep train.jsonl --lr 1e-5,3e-5,1e-4,3e-4 --halve-after 20 --evaluate test.jsonl",
)
SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}
LINE_EVERY_S = 30.0
"""Interval of the lines of progress where there is no terminal."""

Number = TypeVar("Number", int, float)

data_app = typer.Typer(help="Check chat data before training.", no_args_is_help=True)


@data_app.callback()
def group() -> None:
    """Check chat data before training."""


@data_app.command(
    "show",
    epilog=examples(
        "cotrain data show train.jsonl --tokenizer Qwen/Qwen3-0.6B",
        "cotrain data show train.jsonl --train-on all_answers --first 10",
    ),
)
def show_data(
    file: Annotated[Path, typer.Argument(help='JSONL: {"messages": [...], "tools": [...]}', exists=True)],
    tokenizer: TokenizerName = None,
    base_model: ModelName = None,
    train_on: TrainOnText = "last_answer",
    prompt_weight: Annotated[float, typer.Option(help="Weight of all other tokens.")] = 0.0,
    max_tokens: MaxTokens = None,
    too_long: Annotated[str, typer.Option(help="refuse, cut or drop.")] = "refuse",
    first: Annotated[int, typer.Option(min=0, help="Number of datums to print.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print datums as the model reads them. Trained parts are green, or in ⟦brackets⟧ without colours.

    Conversations that cannot be rendered are counted, and the first reason is printed.
    """
    with failing_in_a_sentence():
        conversations = _conversations(file)
        used = _tokenizer_of(tokenizer, base_model)
        rendered = render(
            conversations,
            used,
            train_on=cast(TrainOn, train_on),
            prompt_weight=prompt_weight,
            max_tokens=max_tokens,
            too_long=cast(TooLong, too_long),
            on_refused="skip",
        )
        report = rendered.report
        if report.refused and not rendered.datums:
            raise UnsupportedInput(report.refused[0])
    chosen = rendered.datums[:first]
    texts = [marked(datum, used) for datum in chosen]
    is_terminal = sys.stdout.isatty()
    shown: list[Text | str] = []
    for number, (datum, text) in enumerate(zip(chosen, texts, strict=True), 1):
        shown += [f"--- {number}", _coloured(datum, used) if is_terminal else text]
    value = {**vars(report), "shown": texts}
    print_result(value, *shown, report.sentence(), as_json=as_json)


def sweep(
    file: Annotated[Path, typer.Argument(help='JSONL: {"messages": [...]}', exists=True)],
    lr: Annotated[str, typer.Option(help="Learning rates, separated by commas.")],
    rank: Annotated[str, typer.Option(help="Ranks, separated by commas.")] = "32",
    seed: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    base_model: ModelName = None,
    tokenizer: TokenizerName = None,
    train_on: TrainOnText = "last_answer",
    max_tokens: MaxTokens = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Datums of one step.")] = 16,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: one pass through the file.")] = None,
    schedule: Annotated[str, typer.Option(help="constant, linear or cosine.")] = "constant",
    halve_after: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the better half after this number of steps, and again after each doubling."),
    ] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Held-out JSONL: its loss ranks the runs.", exists=True)] = None,
    save: Annotated[str, typer.Option(help="Name of the best run's checkpoint.")] = "sweep-best",
    as_json: AsJson = False,
) -> None:
    """Train every combination of the settings at once, and save the best run.

    A batch is sent once for all of them. The table shows each run while it trains. Ctrl-C ends the training early.
    """
    with failing_in_a_sentence():
        settings = [
            {"lr": rate, "rank": width, "seed": number}
            for width, rate, number in product(
                _numbers("--rank", rank, int), _numbers("--lr", lr, float), _numbers("--seed", seed, int)
            )
        ]
        if schedule not in SCHEDULES:
            raise UnsupportedInput(f"--schedule must be one of {', '.join(SCHEDULES)}")
        used = _tokenizer_of(tokenizer, base_model)
        datums, unseen = (_datums(path, used, train_on, max_tokens) if path else [] for path in (file, evaluate))
    batches = _batches_of(datums, batch_size, steps)
    with opened() as service:
        made = service.create_sweep(_model_of(service, base_model), settings)
        is_interrupted = False
        with _shown(made, len(batches), shown=not as_json) as progress:
            try:
                best = made.halve(
                    batches,
                    steps=halve_after or len(batches),
                    evaluation=unseen or None,
                    lr_factor=SCHEDULES[schedule],
                    progress=progress,
                )
            except KeyboardInterrupt:
                best, is_interrupted = made.best(), True
        path = best.run.save_state(save, overwrite=True).result().path
        rows = [_row(trial) for trial in made.trials]
        made.close()
    print_result(
        {"sweep": made.name, "best": best.number, "path": path, "trials": rows},
        _view(made, len(batches)),
        f"The best is run {best.number} (loss {best.score:.4g}): {path}",
        as_json=as_json,
    )
    if is_interrupted:
        done = f"{len(best.losses)} of {len(batches)} steps"
        typer.echo(f"interrupted after {done}: the best run so far is saved", err=True)
        raise typer.Exit(1)


def _coloured(datum: Datum, tokenizer: Any) -> Text:
    """Return the text of a datum for a terminal: trained parts green, other weights yellow, the prompt dim."""
    shown = Text()
    for text, weight in parts(datum, tokenizer):
        shown.append(text, "dim" if not weight else "bold green" if weight == 1 else "yellow")
    return shown


def _batches_of(datums: Sequence[Datum], size: int, steps: int | None) -> list[list[Datum]]:
    """Return the batches of all steps, by default of one pass; more steps begin with the first datum again."""
    whole = [list(datums[at : at + size]) for at in range(0, len(datums), size)]
    return [whole[step % len(whole)] for step in range(steps or len(whole))]


def _view(sweep: Sweep[Any], steps: int) -> Table:
    """Return the table of the runs, the best first."""
    ranked = sorted(sweep.trials, key=lambda trial: (trial.is_ended, _arrived(trial), trial.number))
    shown = table(
        ("run", "lr", "rank", "seed", "step", "loss", "evaluation", "state"), (_cells(trial, steps) for trial in ranked)
    )
    for column in shown.columns[:7]:
        column.justify = "right"
    return shown


def _cells(trial: Trial[Any], steps: int) -> tuple[object, ...]:
    state = Text("ended", "dim") if trial.is_ended else trial.failure or "live"
    done = sum(not math.isnan(loss) for loss in trial.losses)
    given = trial.settings
    last = (_last(trial.losses), _last(trial.evaluations))
    return (
        *(trial.number, f"{given['lr']:g}", given["rank"], given["seed"], f"{done}/{steps}"),
        *("" if loss is None else f"{loss:.4f}" for loss in last),
        state,
    )


def _row(trial: Trial[Any]) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "run": trial.run.model_id,
        **trial.settings,
        "steps": len(trial.losses),
        "loss": _last(trial.losses),
        "evaluation": _last(trial.evaluations),
        "ended": trial.is_ended,
        "failure": trial.failure,
    }


def _last(losses: Sequence[float]) -> float | None:
    """Return the last loss that has arrived, or None."""
    return next((loss for loss in reversed(losses) if math.isfinite(loss)), None)


def _arrived(trial: Trial[Any]) -> float:
    """Return the score without the steps in flight, or infinity."""
    last = _last(trial.evaluations or trial.losses)
    return math.inf if last is None else last


@contextmanager
def _shown(sweep: Sweep[Any], steps: int, *, shown: bool) -> Iterator[Callable[[Sweep[Any]], None]]:
    """Show the table on stderr while the block runs, or a line every LINE_EVERY_S if that is no terminal."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not (shown and console.is_terminal):
        yield _lines(steps) if shown else lambda _: None
        return
    with PROGRESS.hidden(), Live(Harmless(_view(sweep, steps)), console=console, transient=True) as live:
        yield lambda each: live.update(Harmless(_view(each, steps)), refresh=True)


def _lines(steps: int) -> Callable[[Sweep[Any]], None]:
    """Return a function that prints the progress of a sweep on stderr, at most every LINE_EVERY_S."""
    printed_at = time.monotonic()

    def print_line(sweep: Sweep[Any]) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at < LINE_EVERY_S:
            return
        printed_at = time.monotonic()
        best = min(sweep.live, key=_arrived)
        done = sum(not math.isnan(loss) for loss in best.losses)
        typer.echo(f"step {done} of {steps}: the lowest loss is {_arrived(best):.4g}, of run {best.number}", err=True)

    return print_line


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UnsupportedInput(f"{option} must be numbers separated by commas, not {text!r}") from None


def _datums(path: Path, tokenizer: Any, train_on: str, max_tokens: int | None) -> list[Datum]:
    return render(_conversations(path), tokenizer, train_on=cast(TrainOn, train_on), max_tokens=max_tokens).datums


def _conversations(path: Path) -> list[Conversation]:
    found = read_chat(path)
    if not found:
        raise UnsupportedInput(f"{path} has no conversation to train on")
    return found


def _tokenizer_of(name: str | None, base_model: str | None) -> Any:
    """Load a tokenizer by its folder or name, or that of the server's model. Raises TokenizerMissing."""
    if name is not None:
        return _load_tokenizer(name)
    with opened() as service:
        return service.create_sampling_client(base_model=_model_of(service, base_model)).get_tokenizer()


def _model_of(service: ServiceClient, base_model: str | None) -> str:
    """Return the model, or the only one of the server. Raises UnsupportedInput if it has several."""
    models = service.get_server_capabilities().supported_models
    names = [model.model_name for model in models if model.model_name]
    if base_model is None and len(names) != 1:
        raise UnsupportedInput(f"give --base-model: one of {', '.join(names)}")
    return base_model or names[0]


def _load_tokenizer(name: str) -> Any:
    try:
        return import_module("transformers").AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ModuleNotFoundError as error:
        raise TokenizerMissing(
            "a tokenizer needs transformers: pip install -c constraints.txt '.[tokenizer]'"
        ) from error
    except (OSError, ValueError) as error:
        raise TokenizerMissing(
            f"--tokenizer: {name!r} is no folder with a tokenizer, and none is on the hub"
        ) from error
