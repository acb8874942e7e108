"""SphereOptimizer in the trainers that people use, as they are installed: ``make integrations``."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fisherfold.optim import (
    MKFAC,
    SphereOptimizer,
    TrainerFactory,
    param_groups,
    register_with_timm,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs; ours are looked for by name
DIRECTIONS = ["spectral", "natural"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def samples(n=256):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, :3] + x[:, 3:]).argmax(1)


def loss_of(model):
    x, y = samples()
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x), y).item()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lightning_clips_schedules_saves_and_resumes(direction, tmp_path):
    L = pytest.importorskip("lightning")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = SphereOptimizer(self, 0.1, rest_lr=0.02, direction=direction, every=4)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    loader = DataLoader(TensorDataset(*samples()), batch_size=32)

    def fit(epochs, **options):
        module = Module()
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
        )
        trainer.fit(module, loader, **options)
        return module, trainer

    whole, trainer = fit(4)
    assert loss_of(whole.net) < 0.6 * loss_of(network())
    if direction == "natural":
        assert "curvature: 1 of 1 weight" in trainer.optimizers[0].report()
    _, first = fit(2)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(4, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_accelerate_prepares_accumulates_and_saves(direction, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = network()
    made = SphereOptimizer(net, 0.1, rest_lr=0.02, direction=direction, every=2)
    loader = DataLoader(TensorDataset(*samples()), batch_size=32)
    model, optimizer, loader = accelerator.prepare(net, made, loader)
    before = loss_of(net)
    net.train()

    def train(epochs):
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(F.cross_entropy(model(x), y))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

    train(5)
    accelerator.save_state(tmp_path)
    train(3)
    ended = [p.detach().clone() for p in net.parameters()]
    assert loss_of(net) < 0.7 * before
    if direction == "natural":
        assert "curvature: 1 of 1 weight" in optimizer.optimizer.report()
        optimizer.optimizer.refresh([samples()], F.cross_entropy)
    accelerator.load_state(tmp_path)
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), ended, strict=True))
    net.train()
    train(3)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), ended, strict=True))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_trainer_of_hugging_face_takes_the_factory(direction, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    # it takes the folder tests/datasets for the package of that name
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels=None):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x, y = samples()
    model = Model()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=4,
            per_device_train_batch_size=32,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            lr_scheduler_type="cosine",
        ),
        train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
        optimizer_cls_and_kwargs=(
            TrainerFactory,
            {"lr": 0.1, "rest_lr": 0.02, "direction": direction, "every": 4},
        ),
    )
    before = loss_of(model.net)
    model.train()
    trainer.train()
    assert loss_of(model.net) < 0.7 * before
    found = trainer.optimizer
    assert isinstance(getattr(found, "optimizer", found), SphereOptimizer)


def test_timm_makes_the_optimizer_and_its_schedulers_step_it():
    timm = pytest.importorskip("timm")
    from timm.optim import create_optimizer_v2, param_groups_weight_decay
    from timm.scheduler import create_scheduler_v2

    register_with_timm()
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4)
    optimizer = create_optimizer_v2(
        model, "sphere", lr=0.02, weight_decay=0.05, param_group_fn=param_groups
    )
    assert isinstance(optimizer, SphereOptimizer)
    rules = {g["rule"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert rules["spheres"] == (0.02, 0.0)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=4, warmup_epochs=1)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    losses = []
    for epoch in range(4):
        scheduler.step(epoch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    groups = param_groups_weight_decay(model, 0.05)
    with pytest.warns(UserWarning, match="weight decay has no meaning for weights on spheres"):
        SphereOptimizer([groups[1] | {"rule": "spheres"}], 0.02)


def test_a_transformer_of_hugging_face_trains():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(32).reshape(2, 16) % 17
    optimizer = SphereOptimizer(model, 0.02, rest_lr=5e-3, example_input={"input_ids": tokens})
    rules = {n: g["rule"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rules["transformer.h.0.mlp.c_fc.weight"] == "muon"
    assert rules["transformer.wte.weight"] == "adamw"
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_of_ours_warns_in_an_ordinary_loop():
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = MKFAC(net)
        for x, y in zip(samples()[0].split(32), samples()[1].split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
