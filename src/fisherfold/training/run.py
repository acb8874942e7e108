"""One training run: network, optimizer, and a step that is one CUDA graph where there is a GPU.

The step reads its batch from the augmented epoch by a counter on the device, so that augmentation, forward, backward
and optimizer are replayed without the host; the first steps of an epoch run uncaptured, which warms everything up and
is training all the same. Learning rates are tensors that the schedule fills between epochs.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from fisherfold.optim import MKFAC, RowAhead, RowAscent, RowNoise, ScaleAscent
from fisherfold.training import checkpoint
from fisherfold.training.build import build_model, build_optimizer
from fisherfold.training.data import ImagePool
from fisherfold.training.mixing import Mixing
from fisherfold.training.options import Settings

WARM_UP = 3
LARGEST_SEED = 10**12  # times a million, and epochs added, it is still a whole number of 64 bits
JUDGED_AT_ONCE = 1000
MEASURED = 10  # batches of about as many, from which batch norms of averaged weights take their statistics


class Part(NamedTuple):
    """A batch or a part of one, as the network sees it.

    Attributes:
        images: normalised, and mixed where they are.
        labels: of the images.
        share: of the images in what they are mixed with; the rest is theirs in reverse order.
        answers: the probabilities that the averaged network gives the classes, where it teaches.
    """

    images: Tensor
    labels: Tensor
    share: Tensor
    answers: Tensor | None


class Run:
    """A network in training.

    Args:
        settings: how it is trained.
        model: as for ``build_model``.
        pool: the images.
        seed: of the weights, the order of the images and their augmentation.
        compiled: pass the network through ``torch.compile`` (CUDA only).

    Raises:
        ValueError: if there are fewer images than a batch, or the seed is too large for what is derived from it.
    """

    def __init__(
        self, settings: Settings, model: str, pool: ImagePool, *, seed: int = 0, compiled: bool = True
    ) -> None:
        if len(pool) < settings.batch:
            raise ValueError(f"a batch of {settings.batch} needs as many images, the pool has {len(pool)}")
        seed = operator.index(seed)
        if abs(seed) > LARGEST_SEED:
            raise ValueError(f"seed must be between {-LARGEST_SEED} and {LARGEST_SEED}, got {seed}")
        self.settings, self.model_name, self.pool, self.seed = settings, model, pool, seed
        self.device = pool.device
        self.steps_per_epoch = len(pool) // settings.batch
        self.done_epochs = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = build_model(model, pool.classes, dropout=settings.dropout)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.images, self.labels = pool.epoch(seed, 0)
        self.optimizer = build_optimizer(settings, self.network, pool.normalised(self.images[:32]))
        self.cuda = self.device.type == "cuda"
        self.turned: AbstractContextManager[Any] = nullcontext()
        if settings.noise:
            self.turned = RowNoise(self.network.parameters(), settings.noise, fuse=self.cuda)
        if settings.ahead:
            self.turned = RowAhead(self.network.parameters(), settings.ahead, fuse=self.cuda)
        self.ascents: list[RowAscent | ScaleAscent] = []
        if settings.ascent:
            self.ascents.append(RowAscent(self.network.parameters(), settings.ascent, fuse=self.cuda))
        if settings.ascent_scales:
            self.ascents.append(ScaleAscent(self.network.parameters(), settings.ascent_scales))
        self.averaged: AveragedModel | None = None
        if settings.average:
            decay = 1 - 1 / settings.average
            self.averaged = AveragedModel(
                self.network,
                multi_avg_fn=get_ema_multi_avg_fn(decay),  # type: ignore[no-untyped-call]
            ).eval()
        self.compiled = compiled and self.cuda
        self.forward = self._ready(self.network)
        self.teacher = self._ready(self.averaged.module) if self.averaged and settings.teaching else None
        self.teaching = torch.zeros((), device=self.device)
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=settings.smoothing)
        self.mixing = Mixing(
            settings, steps=self.steps_per_epoch, side=self.images.shape[1], seed=seed, device=self.device
        )
        self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.offsets = torch.arange(settings.batch, device=self.device)
        self.loss_sum = torch.zeros((), device=self.device)
        self.hits = torch.zeros((), dtype=torch.int64, device=self.device)
        self.judged = torch.zeros(4, device=self.device)
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.graph: Any = None
        self._follow()

    # ------------------------------------------------------------------ identity and state

    @property
    def header(self) -> dict[str, Any]:
        """What the run is: a checkpoint of another one is refused."""
        return {
            "dataset": self.pool.dataset,
            "model": self.model_name,
            "seed": self.seed,
            "split": self.pool.split,
            "images": len(self.pool),
            "settings": self.settings.as_json(),
        }

    def save(self, path: str) -> None:
        """Write a checkpoint after a whole epoch.

        Args:
            path: the file.
        """
        self._wait()
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs": self.done_epochs,
            "averaged": self.averaged.state_dict() if self.averaged else {},
        }
        checkpoint.save(path, state, self.header)

    def load(self, path: str, *, of: Settings | None = None) -> None:
        """Go on from a checkpoint.

        Args:
            path: the file.
            of: settings of the run that wrote it, if it was another one that these would have trained alike so far.
        """
        led = self.header if of is None else {**self.header, "settings": of.as_json()}
        state = checkpoint.load(path, led, self.device)
        self.network.load_state_dict(state["network"])
        if self.averaged:
            self.averaged.load_state_dict(state["averaged"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # the schedule fills it, wherever it came from
                group["lr"] = rate
        self.done_epochs, self.graph = int(state["epochs"]), None
        self._follow()

    # ------------------------------------------------------------------ one epoch, in pieces that may interleave

    def begin_epoch(self) -> None:
        """Augment the images, set the rates, renew the curvature where it is due."""
        epoch = self.done_epochs
        with self._on_stream():
            images, labels = self.pool.epoch(self.seed, epoch)
            self.images.copy_(images)
            self.labels.copy_(labels)
            for counter in (self.counter, self.loss_sum, self.hits):
                counter.zero_()
            self.mixing.draw(epoch)
            if isinstance(self.turned, RowAhead):
                self.turned.forget()  # the last step of an epoch is not in a checkpoint
            self._set_rates(epoch)
            self.teaching.fill_(self.settings.teaching_at(epoch))
            if self.settings.ascends_at(epoch) != self.settings.ascends_at(epoch - 1):
                self.graph = None  # a step is another one from here on
            self.network.train()
            self._seed_draws(epoch)
            if self.settings.refreshes_at(epoch):
                with self._own_draws():
                    self._refresh(epoch)

    def step(self, index: int) -> None:
        """Do one step, captured once the first ones have run.

        Args:
            index: its number in the epoch.
        """
        with self._on_stream(), self._own_draws():
            if not self.cuda or (self.graph is None and index < WARM_UP):
                self.optimizer.zero_grad(set_to_none=True)
                try:
                    self._step()
                except FloatingPointError:  # a gradient is not finite: the run has diverged, which its loss tells
                    self.loss_sum.fill_(math.nan)
                return
            if self.graph is None:
                self._capture()
            self.graph.replay()

    def judge(self) -> None:
        """Judge the network, or that of the averaged weights, without waiting for what the device finds."""
        with self._on_stream():
            loss, accuracy = self._judge(self._average() if self.averaged else self.network)
            seen = self.steps_per_epoch * self.settings.batch
            trained = self.loss_sum / self.steps_per_epoch, 100 * self.hits / seen
            self.judged = torch.stack([*trained, loss, accuracy])

    def end_epoch(self) -> dict[str, Any]:
        """Wait for the judgement.

        Returns:
            The epoch's entry: training loss and accuracy (in percent), and those on the images it is judged by.
        """
        self.done_epochs += 1
        with self._on_stream():
            values = self.judged.tolist()
        rates = self.settings.rates(self.done_epochs - 1)
        entry: dict[str, Any] = {"epoch": self.done_epochs}
        for name, value in zip(("train_loss", "train_accuracy", "loss", "accuracy"), values, strict=True):
            entry[name] = float(f"{value:.6g}")
        return entry | {"lr": rates[0], "manifold_lr": rates[1]}

    @property
    def over(self) -> bool:
        """Whether all epochs are done."""
        return self.done_epochs >= self.settings.epochs

    # ------------------------------------------------------------------ the parts

    def _step(self) -> None:
        batch = self.counter * self.settings.batch + self.offsets
        images, labels = self.pool.normalised(self.images[batch]), self.labels[batch]
        if self.settings.ascends_at(self.done_epochs):
            loss, outputs = self._uphill(images, labels)
        else:
            with self.turned:
                loss, outputs = self._gradient(self._part(images, labels))
        self.optimizer.step()
        with torch.no_grad():
            self.loss_sum += loss.detach()
            self.hits += (outputs.argmax(dim=1) == labels).sum()
            self.counter += 1

    def _part(self, images: Tensor, labels: Tensor) -> Part:
        images, share, answers = self.mixing.mixed(images, self.counter), self.mixing.share(self.counter), None
        if self.teacher:
            with torch.no_grad(), self._autocast():
                answers = (self.teacher(images).float() / self.settings.temperature).softmax(dim=1)
        return Part(images, labels, share, answers)

    def _gradient(self, part: Part) -> tuple[Tensor, Tensor]:
        with self._autocast():
            outputs = self.forward(part.images)
            loss = self.loss_fn(outputs, part.labels)
            if self.mixing:
                loss = torch.lerp(self.loss_fn(outputs, part.labels.flip(0)), loss, part.share)
            if part.answers is not None:
                loss = torch.lerp(loss, self._divergence(outputs, part.answers), self.teaching)
        loss.backward()
        return loss, outputs

    def _divergence(self, outputs: Tensor, answers: Tensor) -> Tensor:
        """T² KL(answers, softmax(outputs/T)): the square keeps gradients of the size that they have at T = 1."""
        heat = self.settings.temperature
        logs = (outputs.float() / heat).log_softmax(dim=1)
        return heat**2 * nn.functional.kl_div(logs, answers, reduction="batchmean")

    def _uphill(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of the parts' gradients, each where weights are moved towards growing loss of its own part."""
        count, found, sums = self.settings.ascent_parts, [], []
        for pair in zip(images.chunk(count), labels.chunk(count), strict=True):
            part = self._part(*pair)
            self.optimizer.zero_grad(set_to_none=True)
            found.append(self._gradient(part))
            with ExitStack() as moved:
                for ascent in self.ascents:
                    moved.enter_context(ascent)
                self.optimizer.zero_grad(set_to_none=True)
                self._gradient(part)
            sums.append([p.grad for p in self.network.parameters()])
        if count > 1:
            for p, gradients in zip(self.network.parameters(), zip(*sums, strict=True), strict=True):
                p.grad = sum(gradients) / count  # not stacked: they keep their layout in memory
        losses, outputs = zip(*found, strict=True)
        return torch.stack(losses).mean(), torch.cat(outputs)

    def _ready(self, network: nn.Module) -> Callable[[Tensor], Tensor]:
        return torch.compile(network, dynamic=False) if self.compiled else network

    def _capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    def _refresh(self, epoch: int) -> None:
        assert isinstance(self.optimizer, MKFAC)
        for group in self.optimizer.param_groups:
            group["damping"] = self.settings.damping_at(epoch)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = None  # the inverses may move to other memory, and the step is captured again
        with self._autocast(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the inverse of .* outgrew its memory")
            self.optimizer.refresh(self._batches(), self.loss_fn)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.settings.batch
        for index in range(min(self.settings.refresh_batches, self.steps_per_epoch)):
            part = slice(index * size, (index + 1) * size)
            yield self.pool.normalised(self.images[part]), self.labels[part]

    def _set_rates(self, epoch: int) -> None:
        lr, manifold_lr = self.settings.rates(epoch)
        for group in self.optimizer.param_groups:
            value = manifold_lr if group.get("manifold", "none") != "none" else lr
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    @property
    def _draws(self) -> bool:
        return bool(self.settings.dropout or self.settings.noise)

    def _seed_draws(self, epoch: int) -> None:
        if not self._draws:
            return
        seed = 1_000_003 * self.seed + 100_003 * epoch + 1
        if self.cuda:
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        else:
            self.draw_state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """On a CPU, draws of dropout and noise that depend on seed and epoch alone, whatever is trained beside."""
        if self.cuda or not self._draws:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.draw_state)
            yield
            self.draw_state = torch.get_rng_state()

    def _average(self) -> nn.Module:
        """The network of the averaged weights, its batch norms measured on images of this epoch."""
        assert self.averaged is not None
        self.averaged.update_parameters(self.network)
        count = min(max(len(self.images) // JUDGED_AT_ONCE, 1), MEASURED)
        parts = torch.tensor_split(self.images[: MEASURED * JUDGED_AT_ONCE], count)  # all parts weigh the same
        with self._autocast(), self._own_draws():
            update_bn((self.pool.normalised(part) for part in parts), self.averaged)
        network: nn.Module = self.averaged.module
        return network

    @torch.no_grad()
    def _judge(self, network: nn.Module) -> tuple[Tensor, Tensor]:
        network.eval()
        loss, hits = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for start in range(0, len(self.pool.judged), JUDGED_AT_ONCE):
            part = slice(start, start + JUDGED_AT_ONCE)
            images, labels = self.pool.judged[part], self.pool.judged_labels[part]
            with self._autocast():
                outputs = network(self.pool.normalised(images))
            loss += nn.functional.cross_entropy(outputs.float(), labels, reduction="sum")
            hits += (outputs.argmax(dim=1) == labels).sum()
        count = len(self.pool.judged)
        return loss / count, 100 * hits / count

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False) if self.cuda else nullcontext()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.cuda else nullcontext()

    def _follow(self) -> None:
        """Let the run's stream begin after what is under way on the current one."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
