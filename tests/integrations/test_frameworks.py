"""SphereOptimizer in the trainers that people use, as they are installed: ``make integrations``."""

from __future__ import annotations

import copy
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
        assert "curvature: 2 of 2 weights" in trainer.optimizers[0].report()
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
        assert "curvature: 2 of 2 weights" in optimizer.optimizer.report()
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


def test_learning_rate_and_weight_decay_of_training_arguments(tmp_path):
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(str(tmp_path), learning_rate=0.03, weight_decay=0.1)
    factory, options = TrainerFactory.of(args, momentum=0.95)
    optimizer = factory()(network(), **options)
    angles = [g for g in optimizer.param_groups if g["rule"] == "spheres"]
    assert [g["lr"] for g in angles] == [0.03]
    assert {g["weight_decay"] for g in optimizer.param_groups if g["kind"] == "matrices"} == {0.1}
    assert angles[0]["momentum"] == 0.95
    with pytest.raises(ValueError, match="set it to an angle in radians"):
        TrainerFactory.of(transformers.TrainingArguments(str(tmp_path)))


def timm_steps(model, optimizer, scheduler, steps=4):
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    losses = []
    for epoch in range(steps):
        scheduler.step(epoch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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
    rules = {g["kind"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert rules == {"spheres": (0.02, 0.0), "matrices": (0.01, 0.05), "vectors": (0.01, 0.0)}
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=4, warmup_epochs=1)
    losses = timm_steps(model, optimizer, scheduler)
    assert losses[-1] < losses[0]
    assert "fc.weight" in optimizer.report()
    assert "head: no other weight follows" in optimizer.report()
    groups = param_groups_weight_decay(model, 0.05)
    with pytest.warns(UserWarning, match="weights on spheres keep their norms"):
        SphereOptimizer([groups[1] | {"rule": "spheres"}], 0.02)


def test_layer_decay_of_timm_scales_both_rates():
    timm = pytest.importorskip("timm")
    from functools import partial

    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    register_with_timm()
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, num_classes=4, depth=3, embed_dim=24, num_heads=2
    )
    groups = partial(param_groups, layer_decay=0.5)
    optimizer = create_optimizer_v2(model, "sphere", lr=0.02, param_group_fn=groups)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=40, warmup_epochs=0)
    losses = timm_steps(model, optimizer, scheduler, 3)
    assert losses[-1] < losses[0]
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    last, before = rates["blocks.2.mlp.fc1.weight"], rates["blocks.1.mlp.fc1.weight"]
    assert before == pytest.approx(last / 2)
    assert rates["blocks.0.norm1.weight"] == pytest.approx(rates["blocks.1.norm1.weight"] / 2)


def test_a_transformer_of_hugging_face_trains():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=16, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(32).reshape(2, 16) % 17
    optimizer = SphereOptimizer(model, 0.05, total_steps=30)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    rules = {n: g["rule"] for g in optimizer.param_groups for n in g["param_names"]}
    hidden = {n for n, rule in rules.items() if rule == "spheres"}
    maps = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert hidden == {f"transformer.h.0.{name}.weight" for name in maps}
    assert rules["transformer.wte.weight"] == "adamw"


def test_experts_and_towers_of_hugging_face():
    """Mixtral's experts turn, its router too; CLIP's two projections are heads."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=17, num_local_experts=3, **small, **heads)
    )
    tokens = torch.arange(32).reshape(2, 16) % 17
    optimizer = SphereOptimizer(model)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    rules = {n: g["rule"] for g in optimizer.param_groups for n in g["param_names"]}
    adamw = {n for n, rule in rules.items() if rule == "adamw" and "norm" not in n}
    assert adamw == {"model.embed_tokens.weight", "lm_head.weight"}
    parts = small | {"num_attention_heads": 2, "projection_dim": 8}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=parts | {"vocab_size": 17, "eos_token_id": 2},
            vision_config=parts | {"image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
    ).train()
    optimizer = SphereOptimizer(clip)
    images = torch.randn(2, 3, 8, 8)
    clip(input_ids=tokens, pixel_values=images, return_loss=True).loss.backward()
    optimizer.step()
    found = {n for n, why in optimizer._reasons.items() if why.startswith("head")}
    assert found == {"visual_projection.weight", "text_projection.weight"}


def test_a_loop_as_nanogpt_has_it():
    """Accumulation, clipping, a rate that the loop writes by itself, and a checkpoint in between."""
    torch.manual_seed(0)
    net = network()
    optimizer = SphereOptimizer(net, lr=0.05)
    start = loss_of(net)
    base = [group["lr"] for group in optimizer.param_groups]
    x, y = samples()
    net.train()
    for step in range(20):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * (1 - step / 20)
        for part in torch.arange(256).split(128):
            (F.cross_entropy(net(x[part]), y[part]) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 9:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            optimizer = SphereOptimizer(net, lr=0.05)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    assert loss_of(net) < 0.6 * start


def test_the_trainer_of_ultralytics(tmp_path, monkeypatch):
    """One epoch of a detector with random weights on drawn squares: its loop, warm-up, average and files."""
    pytest.importorskip("ultralytics")
    from PIL import Image
    from ultralytics.models.yolo.detect import DetectionTrainer

    monkeypatch.setenv("YOLO_OFFLINE", "true")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        for index in range(8):
            pixels = torch.randint(0, 60, (64, 64, 3), generator=generator, dtype=torch.uint8)
            pixels[16:40, 16:40] = 250
            Image.fromarray(pixels.numpy()).save(tmp_path / "images" / split / f"{index}.png")
            text = "0 0.4375 0.4375 0.375 0.375\n"
            (tmp_path / "labels" / split / f"{index}.txt").write_text(text)
    data = tmp_path / "data.yaml"
    data.write_text(
        f"path: {tmp_path}\ntrain: images/train\nval: images/val\nnames: [square, disc]\n"
    )

    class Trainer(DetectionTrainer):
        def build_optimizer(self, model, name="auto", lr=0.02, momentum=0.9, decay=0.0, **_):
            return SphereOptimizer(model, lr=lr, momentum=momentum, weight_decay=decay)

        # the builds of torchvision for CPUs may lack the operators that validation needs
        def validate(self):
            return {}, 0.0

        def final_eval(self):
            pass

    options = {"model": "yolo26n.yaml", "data": str(data), "epochs": 2, "imgsz": 64, "batch": 4}
    quiet = {"device": "cpu", "workers": 0, "plots": False, "val": False, "verbose": False}
    where = {"project": str(tmp_path / "runs"), "lr0": 0.02, "amp": False}
    trainer = Trainer(overrides=options | quiet | where)
    trainer.train()
    assert isinstance(trainer.optimizer, SphereOptimizer)
    heads = [n for n, why in trainer.optimizer._reasons.items() if why.startswith("head")]
    assert len(heads) == 12
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_nothing_of_ours_warns_in_an_ordinary_loop():
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = MKFAC(net, example_input=samples()[0][:8])
        for x, y in zip(samples()[0].split(32), samples()[1].split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
