"""Command `cotrain data show`: the datums of a file of conversations, with their trained parts marked."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from cotrain.clients.service import ServiceClient
from cotrain.commands.terminal import AsJson, examples, failing_in_a_sentence, opened, print_result
from cotrain.data.conversations import read_chat
from cotrain.data.rendering import TooLong, TrainOn, render
from cotrain.data.view import marked, parts
from cotrain.errors import TokenizerMissing, UnsupportedInput
from cotrain.wire.datums import Datum

BaseModel = Annotated[str | None, typer.Option(help="The server's model, if it has several.")]
TokenizerName = Annotated[
    str | None, typer.Option(help="A folder or a name on the hub. Default: that of the server's model.")
]
TrainOnText = Annotated[str, typer.Option(help="last_answer, all_answers or each_answer.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest datum.")]

app = typer.Typer(help="Check chat data before training.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Check chat data before training."""


@app.command(
    epilog=examples(
        "cotrain data show train.jsonl --tokenizer Qwen/Qwen3-0.6B",
        "cotrain data show train.jsonl --train-on all_answers --first 10",
    )
)
def show(
    file: Annotated[Path, typer.Argument(help='JSONL: {"messages": [...], "tools": [...]}', exists=True)],
    tokenizer: TokenizerName = None,
    base_model: BaseModel = None,
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
        conversations = read_chat(file)
        used = tokenizer_of(tokenizer, base_model)
        rendered = render(
            conversations,
            used,
            train_on=cast("TrainOn", train_on),
            prompt_weight=prompt_weight,
            max_tokens=max_tokens,
            too_long=cast("TooLong", too_long),
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
        shown += [f"--- {number}", coloured(datum, used) if is_terminal else text]
    value = {**vars(report), "shown": texts}
    print_result(value, *shown, report.sentence(), as_json=as_json)


def coloured(datum: Datum, tokenizer: Any) -> Text:
    """Return the text of a datum for a terminal: trained parts green, other weights yellow, the prompt dim."""
    shown = Text()
    for text, weight in parts(datum, tokenizer):
        shown.append(text, "dim" if not weight else "bold green" if weight == 1 else "yellow")
    return shown


def tokenizer_of(name: str | None, base_model: str | None) -> Any:
    """Load a tokenizer by its folder or name, or that of the server's model. Raises TokenizerMissing."""
    if name is not None:
        return _load(name)
    with opened() as service:
        return service.create_sampling_client(base_model=model_of(service, base_model)).get_tokenizer()


def model_of(service: ServiceClient, base_model: str | None) -> str:
    """Return the model, or the only one of the server. Raises UnsupportedInput if it has several."""
    models = service.get_server_capabilities().supported_models
    names = [model.model_name for model in models if model.model_name]
    if base_model is None and len(names) != 1:
        raise UnsupportedInput(f"give --base-model: one of {', '.join(names)}")
    return base_model or names[0]


def _load(name: str) -> Any:
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
