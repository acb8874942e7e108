"""``fisherfold train``: a network of the paper on CIFAR, with a preset of an optimizer, one run per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fisherfold.cli.options import one_of
from fisherfold.cli.voice import Voice
from fisherfold.plain import counted

NAMES = (
    *("sgd", "sgd-tuned", "sgd-averaged", "sgd-sam", "sgd-cutmix", "sgdp", "adam", "adamp", "kfac"),
    *("mkfac", "mkfac-tuned", "mkfac-averaged", "mkfac-sam", "mkfac-cutmix"),
    *("sgdg", "sgdg-limit", "sgdg-tuned"),
)

Dataset = Annotated[
    str, typer.Argument(help="cifar10 or cifar100.", autocompletion=one_of("cifar10", "cifar100"))
]  # fmt: skip
Model = Annotated[
    str,
    typer.Option("--model", help="vgg16bn, or wrnD_K such as wrn16_4.", autocompletion=one_of("vgg16bn", "wrn16_4")),
]
Optimizer = Annotated[
    str, typer.Option("--optimizer", help=f"A preset: {', '.join(NAMES)}.", autocompletion=one_of(*NAMES))
]
Seeds = Annotated[list[int], typer.Option("--seed", help="A seed; give several to train them side by side.")]
Folder = Annotated[Path, typer.Option("--folder", "-o", help="Where logs and checkpoints go.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs, if not the preset's 100.")]
Rate = Annotated[float | None, typer.Option("--lr", min=0, help="The step size, if not the preset's.")]
ManifoldRate = Annotated[
    float | None, typer.Option("--manifold-lr", min=0, help="The step size on spheres, if not the preset's.")
]
Decay = Annotated[float | None, typer.Option("--weight-decay", min=0, help="The weight decay, if not the preset's.")]
Damping = Annotated[float | None, typer.Option("--damping", min=0, help="λ, if not the preset's.")]
Replace = Annotated[
    list[str], typer.Option("--set", metavar="NAME=VALUE", help="Replace any other setting, such as refresh_every=5.")
]
Validation = Annotated[
    bool, typer.Option("--validation", help="Test on a tenth of the training images, left out, not on the test set.")
]
Images = Annotated[
    int | None,
    typer.Option("--images", min=1, help="Only so many training images, and a fifth as many to test on, for a trial."),
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Images per step, if not 128.")]
Every = Annotated[int, typer.Option("--checkpoint-every", min=0, help="Epochs between checkpoints; 0 for none.")]
Board = Annotated[Path | None, typer.Option("--tensorboard", help="Write curves for TensorBoard into this folder.")]


def train(
    voice: Voice, dataset: Dataset, model: Model = "wrn16_4", optimizer: Optimizer = "mkfac", seed: Seeds = [0],  # noqa: B006
    folder: Folder = Path("runs"), device: Device = "auto", epochs: Epochs = None, lr: Rate = None,
    manifold_lr: ManifoldRate = None, weight_decay: Decay = None, damping: Damping = None, replace: Replace = [],  # noqa: B006
    validation: Validation = False, images: Images = None, batch: Batch = None, checkpoint_every: Every = 10,
    tensorboard: Board = None,
) -> None:  # fmt: skip
    """Train WRN-16-4 or VGG16-BN on CIFAR with a preset of an optimizer; the same command resumes it."""
    from fisherfold import training
    from fisherfold.training.train import Job, pick_device

    given = {"epochs": epochs, "lr": lr, "manifold_lr": manifold_lr, "weight_decay": weight_decay, "damping": damping}
    changes: dict[str, Any] = {key: value for key, value in {**given, "batch": batch}.items() if value is not None}
    changes |= dict(training.parse_setting(text) for text in replace)
    chosen = training.settings(optimizer, dataset, model, **changes)
    if images is None and pick_device(device).type == "cpu":
        voice.remark("on a CPU all images take long; for a trial: --images 1000 --epochs 3")
    voice.resume = f"the same command goes on from the last checkpoint in {folder}, or starts again where there is none"
    writer, judged = _board(tensorboard), "validation" if validation else "test"
    with voice.progress(f"{optimizer} on {dataset}", chosen.epochs * len(seed)) as bar:

        def tell(job: Job, entry: dict[str, Any]) -> None:
            bar.say(
                f"seed {job.run.seed}, epoch {entry['epoch']}/{chosen.epochs}: "
                f"training loss {entry['train_loss']:.4f}, accuracy {entry['accuracy']:.2f} %"
            )
            bar.advance()
            for name in ("train_loss", "loss", "accuracy") if writer is not None else ():
                writer.add_scalar(f"{job.path.stem}/{name}", entry[name], entry["epoch"])

        logs = training.train(
            dataset, model, optimizer, seeds=seed, folder=folder, device=device, split=judged, images=images,
            checkpoint_every=checkpoint_every, tell=tell, **changes,
        )  # fmt: skip
    if writer is not None:
        writer.close()
    table = Table(title=f"{optimizer}, {model} on {dataset}, {counted(chosen.epochs, 'epoch')}")
    for name in ("seed", "ended", f"best {judged} accuracy", f"last {judged} accuracy", "training loss", "s/epoch"):
        table.add_column(name, justify="right")
    rows = [
        {
            "seed": log.header["seed"], "ended": log.ended, "best_accuracy": log.best, "last_accuracy": log.last,
            "train_loss": log.epochs[-1]["train_loss"], "seconds_per_epoch": log.seconds,
        }
        for log in logs
    ]  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["seed"]), row["ended"], f"{row['best_accuracy']:.2f}", f"{row['last_accuracy']:.2f}",
            f"{row['train_loss']:.4f}", f"{row['seconds_per_epoch']:.2f}",
        )  # fmt: skip
    facts = {"dataset": dataset, "model": model, "optimizer": optimizer, "settings": chosen.as_json(), "runs": rows}
    voice.answer({**facts, "folder": folder}, table, f"logs: {folder}")


def _board(folder: Path | None) -> Any:
    """A writer for TensorBoard, if one is wanted."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder))
